"""Launches of Triton kernels, written down; each specialisation is compiled once if that is
asked."""

import importlib.util

from parallel.plan.devices import SYMMETRIC, Work
from training.rehearsal.operations import OPERANDS
from training.rehearsal.program import place
from training.rehearsal.trace import Launch, Trace, size_of


class HostArgumentError(RuntimeError):
    """A tensor of the host that a kernel of the device is given."""


def install(trace: Trace, *, compiled: bool = False) -> None:
    """Write launches of Triton kernels down, for the life of this process; with `compiled` each
    specialisation is compiled for the pretended device."""
    if importlib.util.find_spec("triton") is None:
        return
    from spectral.kernels import launches

    major, minor = trace.device.capability
    known: set[object] = set()

    def on_launch(launch: launches.Launch) -> None:
        for tensor in launch.read:
            if not tensor.is_cuda:
                raise HostArgumentError(
                    f"{launch.name} at {place()} is given a tensor on {tensor.device}"
                )
        if compiled and launch.specialisation not in known:
            known.add(launch.specialisation)
            launch.compile_for(10 * major + minor)
        written = launch.written
        read = [x for x in launch.read if not any(x is w for w in written)]
        kind = OPERANDS.get((read or written)[0].dtype, "fp32")
        thrice = launch.arguments.get("PRECISION") == "tf32x3"  # products of the tensor cores
        work = Work(
            sum(size_of(x) for x in (*read, *written, *launch.changed)),
            launch.flops * (3 if thrice else 1),
            "tf32" if kind == "fp32" and thrice else kind,
            share=SYMMETRIC,
        )
        trace.launch(Launch(launch.name, read, written, work, triton=True))

    launches.observe(on_launch)
