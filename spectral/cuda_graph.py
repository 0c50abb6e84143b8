"""A step as one CUDA graph: recorded once, then launched by a single call of the host.

A graph repeats the same kernels on the same memory, so what it reads and writes must lie where it
lay when it was recorded: parameters, state and gradients stay in place, and learning rate and
predicate are tensors that are written in place. Scratch lies in the graph's own pool of memory,
which is the step's arena: it is allocated once and belongs to the graph as long as that exists.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spectral.optimizer import SpectralOptimizer

WARM_UP = 2
"""Calls that are made as they are before one is recorded: libraries, kernels and communicators
start with their first use, which cannot be recorded."""


class CapturedCall:
    """A call without arguments that is recorded on its third time as a CUDA graph and replayed from
    then on. Without CUDA it is called every time, so that a program can be tried anywhere."""

    def __init__(self, call: Callable[[], None], device: torch.device) -> None:
        """`call` must not wait for the device, nor depend on anything but tensors that stay in
        place; its work on other streams must begin after and end before that on the current one.
        """
        self.call = call
        self.device = device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> bool:
        """Whether `call` itself ran, also if only to be recorded; False for a replay."""
        self.calls += 1
        if self.stream is None:
            self.call()
        elif self.graph is not None:
            self.graph.replay()
            return False
        elif self.calls <= WARM_UP:
            self._warm_up(self.stream)
        else:
            self._record(self.stream)
        return True

    def release(self) -> None:
        """Free the graph, which must be before the process groups whose collectives it holds
        are destroyed. The next calls warm up and record anew."""
        if self.graph is not None:
            torch.cuda.synchronize(self.device)
            self.graph.reset()
        self.graph, self.calls = None, 0

    def _warm_up(self, stream: torch.cuda.Stream) -> None:
        """None; the call on the stream that will record, so that what libraries keep per stream is
        there."""
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.call()
        current.wait_stream(stream)

    def _record(self, stream: torch.cuda.Stream) -> None:
        """Record the call, which does not run it, and launches what was recorded."""
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are held to the rules of capture: NCCL has threads of its own.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.call()
        self.graph = graph
        graph.replay()


class CapturedStep:
    """`optimizer.step()` as one CUDA graph.

        optimizer = SpectralSphere(groups, lr=torch.tensor(5e-3, device="cuda"), nonfinite="skip")
        step = CapturedStep(optimizer)

    The learning rates change by `group["lr"].fill_(...)`, as PyTorch's schedulers do; gradients are
    cleared by `zero_grad(set_to_none=False)`. Other fields of the groups are fixed by the graph.
    """

    def __init__(self, optimizer: SpectralOptimizer) -> None:
        """Raises ValueError if a step of `optimizer` would wait for the device or holds a learning
        rate that the graph could not follow."""
        check_capturable(optimizer)
        self.optimizer = optimizer
        device = optimizer.param_groups[0]["params"][0].device
        self._captured = CapturedCall(self._step, device)
        self._gradients: list[int] | None = None

    def __call__(self) -> None:
        """None; one step. Raises RuntimeError if gradients have moved since the first one."""
        places = [0 if p.grad is None else p.grad.data_ptr() for p in self._parameters()]
        if self._gradients is None:
            self._gradients = places
        elif self._gradients != places:
            raise RuntimeError(
                "gradients must stay where they are from the first captured step on; clear them by "
                "zero_grad(set_to_none=False)"
            )
        self._captured()

    def release(self) -> None:
        """Free the graph; the next call may find the gradients elsewhere."""
        self._captured.release()
        self._gradients = None

    def _step(self) -> None:
        self.optimizer.step()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def check_capturable(optimizer: SpectralOptimizer) -> None:
    """Raise ValueError naming what keeps a step from being recorded."""
    if optimizer.defaults["nonfinite"] != "skip":
        raise ValueError(
            "nonfinite must be 'skip' in a captured step: 'raise' waits for the device"
        )
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) != 1:
        raise ValueError(f"parameters must be on one device, got {sorted(map(str, devices))}")
    (device,) = devices
    for i, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device != device:
            raise ValueError(
                f"lr of group {i} must be a 0-d tensor on {device} in a captured step, got {lr!r}"
            )
        if group.get("early_exit"):
            raise ValueError(
                f"early_exit of group {i} must not be True in a captured step: it waits for the "
                "device"
            )
