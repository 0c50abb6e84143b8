"""Captures optimizer steps as CUDA graphs, which are then replayed with a single launch.

A graph replays the same kernels on the same memory. Parameters, state and gradients must therefore
keep their addresses. Learning rates and the active flag are tensors that are updated in place.
Scratch memory comes from the graph's own pool, which is allocated once and freed with the graph.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from .local_part import is_dtensor
from .optimizer import SpectralOptimizer
from .options import rename_
from .parameter_state import MASTER, entry_names, rule_of

WARM_UP = 2
"""Number of eager calls before capture. Libraries, kernels and communicators are initialised on
first use, and this initialisation cannot be captured."""


class CapturedCall:
    """A function without arguments that is captured on the third call and replayed afterwards.

    Without CUDA, every call runs the function eagerly, so programs also run on CPU.
    """

    def __init__(self, call: Callable[[], None], device: torch.device) -> None:
        """Prepare to capture `call` on `device`.

        `call` must not sync with the device, and may only depend on tensors that keep their
        addresses. Work on other streams must fork from the current stream and join it again.
        """
        self.call = call
        self.device = device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> bool:
        """Run, capture or replay `call`. Return False for a replay, which runs no Python code."""
        self.calls += 1
        if self.stream is None:
            self.call()
        elif self.graph is not None:
            self.graph.replay()
            return False
        elif self.calls <= WARM_UP:
            # Run the call on the capture stream, because libraries keep per-stream state.
            current = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                self.call()
            current.wait_stream(self.stream)
        else:
            graph = torch.cuda.CUDAGraph()
            # Capturing launches no kernels. thread_local restricts only this thread, because NCCL
            # makes CUDA calls from other threads.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.call()
            self.graph = graph
            graph.replay()
        return True

    def release(self) -> None:
        """Free the graph. The next calls warm up and capture a new graph.

        Call this method before destroying process groups whose collectives were captured.
        """
        if self.graph is not None:
            torch.cuda.synchronize(self.device)
            self.graph.reset()
        self.graph, self.calls = None, 0


class CapturedStep:
    """Captures `optimizer.step()` as a CUDA graph.

        optimizer = SpectralSphere(groups, lr=torch.tensor(5e-3, device="cuda"), nonfinite="skip")
        step = CapturedStep(optimizer)

    Set learning rates with `group["lr"].fill_(...)`, as PyTorch's schedulers do, and clear
    gradients with `zero_grad(set_to_none=False)`. Other group options must not change, and
    parameters and state must keep their addresses. Call `release` after `load_state_dict`.
    """

    def __init__(self, optimizer: SpectralOptimizer) -> None:
        """Prepare to capture the steps of `optimizer`.

        Raises ValueError if a step would require a host sync, or if a learning rate is not a tensor
        on the device. Raises TypeError if `optimizer` is not a `SpectralOptimizer`.
        """
        if not isinstance(optimizer, SpectralOptimizer):
            raise TypeError(
                f"optimizer must be a SpectralOptimizer, got {type(optimizer).__name__}"
            )
        if optimizer.defaults["nonfinite"] != "skip":
            raise ValueError(
                "nonfinite must be 'skip' in a captured step, because 'raise' requires a host sync"
            )
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        if len(devices) != 1:
            raise ValueError(f"parameters must be on one device, got {sorted(map(str, devices))}")
        (device,) = devices
        for i, group in enumerate(optimizer.param_groups):
            lr = group["lr"]
            if not isinstance(lr, Tensor) or lr.device != device:
                raise ValueError(
                    f"lr of group {i} must be a 0-d tensor on {device} in a captured step, got "
                    f"{lr!r}"
                )
            waits = rule_of(group).waiting_field
            if waits is not None:
                raise ValueError(
                    f"{waits} of group {i} must be False in a captured step, because True causes a "
                    "host sync"
                )
        self.optimizer = optimizer
        self._captured = CapturedCall(lambda: optimizer.step(), device)
        self._first: dict[str, object] | None = None  # constants at the first step

    def __call__(self) -> None:
        """Take a step. Raise RuntimeError if an address or a value in the graph has changed."""
        if self._first is not None:
            now = self._fixed()
            for name in self._first | now:
                if now.get(name) != self._first.get(name):
                    raise RuntimeError(
                        f"{name} must not be replaced after the first captured step; clear "
                        "gradients with zero_grad(set_to_none=False), or call release() to "
                        "recapture"
                    )
        self._captured()
        if self._first is None:  # after the step, because it moves the state of cast parameters
            self._first = self._fixed()

    def _fixed(self) -> dict[str, object]:
        """Return the constants baked into a graph: tensor addresses and field values."""
        fixed: dict[str, object] = {}
        for i, group in enumerate(self.optimizer.param_groups):
            rename_(group["rule"], group)  # a scheduler may have set options under other names
            rule, parameters = rule_of(group), group["params"]
            states = [self.optimizer.state[p] for p in parameters]
            values = {
                "parameters": parameters,
                "gradients": [p.grad for p in parameters],
                "states": [s.get(name) for s in states for name in (*entry_names(rule), MASTER)],
                **{name: [group[name]] for name in ("rule", "lr", "weight_decay")},
                **{field.name: [getattr(rule, field.name)] for field in fields(rule)},
            }
            fixed |= {f"{name} of group {i}": [*map(_identity, x)] for name, x in values.items()}
        return fixed

    def release(self) -> None:
        """Free the graph, so that parameters, state and settings may change until the next call."""
        self._captured.release()
        self._first = None


def _identity(value: object) -> object:
    """Return a tensor's address; return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return (value.to_local() if is_dtensor(value) else value).data_ptr()
