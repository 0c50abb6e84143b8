"""Rehearsal of one rank in this process, which cannot be used for other work afterwards."""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models import initialize as initial_weights
from models.units import Unit
from parallel.comm import groups
from parallel.plan.devices import Device
from training.build import build_trainer
from training.config import Config
from training.rehearsal import fake_cuda, model_parts, process_groups
from training.rehearsal.counts import Counts
from training.rehearsal.device_tensors import DeviceTensors
from training.rehearsal.program import name_of, replace
from training.rehearsal.scenario import PLAIN_STEP, Scenario, scenario
from training.rehearsal.trace import DEFAULT_STREAM, STEP, Call, Trace
from training.rehearsal.triton_launches import install_kernels, install_liger
from training.run import train
from training.step import Trainer


@dataclass
class RankReport:
    """The report of one rank.

    error    first error with its place, None if there was no error
    counts   counts by step and part of the run
    marks    counts so far at the start of each forward pass of the plain step
    findings texts about unordered accesses, and about products that are not IEEE
    calls    collectives in program order
    side_pools        bytes that the allocator reserves for streams other than the default stream
    """

    rank: int
    world: int = 1
    scenario: Scenario | None = None
    error: str | None = None
    counts: dict[tuple[int, str], Counts] = field(default_factory=dict)
    marks: list[Counts] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    side_pools: int = 0


@dataclass(frozen=True)
class Job:
    """The rehearsal of one rank of a config.

    compiled   whether Triton kernels are also compiled for the device
    """

    config: Config
    world: int
    rank: int
    device: Device
    compiled: bool = False

    def perform(self, say: Callable[[str], None] = lambda _: None) -> RankReport:
        """Rehearse the rank in this process; `say` is called with texts about its progress."""
        trace = Trace(self.device, self.rank)
        mode = install(trace, self.world, compiled=self.compiled)
        report = RankReport(self.rank, self.world)
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            rehearsed = report.scenario = scenario(self.config, self.world, Path(folder))
            trace.moved = lambda: say(place_in_run(trace, rehearsed))
            say(f"rank {self.rank}: building the model")
            try:
                with mode, torch.autograd.set_multithreading_enabled(False):
                    run(rehearsed, trace)
            except Exception as error:
                report.error = described(error)
        trace.keep_peak()
        report.counts = trace.counts
        report.marks = trace.marks.get(PLAIN_STEP, [])
        report.findings = [str(finding) for finding in trace.order.findings] + sorted(
            trace.imprecise
        )
        report.calls = trace.calls
        pools = trace.memory.pools
        report.side_pools = sum(size for stream, size in pools.items() if stream != DEFAULT_STREAM)
        return report


def install(trace: Trace, world: int, *, compiled: bool = False) -> DeviceTensors:
    """Replace the GPU and the other ranks until this process ends."""
    os.environ |= {
        "RANK": str(trace.rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(trace.rank % trace.device.node_size),
        "LOCAL_WORLD_SIZE": str(min(world, trace.device.node_size)),
    }
    os.environ.pop("MASTER_ADDR", None)
    mode = DeviceTensors(trace)
    mode.install()
    fake_cuda.install(trace)
    process_groups.install(trace, world)
    install_kernels(trace, compiled=compiled)
    install_liger(trace)
    model_parts.install(trace, mode)
    # Initial values have no effect on the report; only their copy to the device does.
    replace(initial_weights.draws, undrawn)
    return mode


def run(rehearsed: Scenario, trace: Trace) -> None:
    """Start the process groups, and run the scenario."""
    config = rehearsed.config
    layout = groups.initialize(config.parallel.layout, device_type="cuda")
    real = build_trainer

    def observed(*arguments: Any, **options: Any) -> Trainer:
        trainer = real(*arguments, **options)
        for chunk in trainer.model.chunks:
            chunk.register_forward_pre_hook(lambda *_: trace.mark())
        return trainer

    replace(build_trainer, observed)
    train(config, layout, resume="none")


def place_in_run(trace: Trace, rehearsed: Scenario) -> str:
    """Return a phrase with the rank, the step, the part of the run, and the number of the forward
    pass."""
    text = f"rank {trace.rank}: step {trace.step} of {rehearsed.last}, {trace.phase}"
    if trace.phase == STEP:
        passes = len(trace.marks.get(trace.step, ()))
        text += f", forward pass {passes} of {rehearsed.rehearsed * rehearsed.chunks}"
    return text


def undrawn(units: Sequence[Unit], *_: Any, **__: Any) -> Iterator[torch.Tensor]:
    """Return uninitialised weights for `units`."""
    return (torch.empty(unit.shape) for unit in units)


def described(error: BaseException) -> str:
    """Return a text with the error's type and message, and the innermost line of the project or
    megatron-core."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{name}:{f.lineno}" for f in frames if (name := name_of(f.filename)) is not None]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" + (f" (at {places[-1]})" if places else "")
