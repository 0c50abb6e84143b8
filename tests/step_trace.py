"""Trace the operations of a step, and detect host syncs.

`on_meta` moves all tensors of a step to the meta device, which has shapes but no values: operations
that read values, or whose output shape depends on them, fail there. `traced` records every
operation in a call with the shapes, dtypes and devices of its tensors.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OURS = ("spectral", "parallel", "models", "training")
FROM_HOST = (torch.tensor, torch.from_numpy, torch.asarray, Tensor.new_tensor)
"""Functions that create a tensor from host values, which on a GPU is a blocking copy."""
VALUES = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "unique",
    "equal.default",
)
"""Operations whose result, or the shape of the result, is needed on the host."""

_META = torch.library.Library("aten", "IMPL")
"""PyTorch has a meta kernel for fused AdamW with a float learning rate, but not with a tensor."""
_META.impl("_fused_adamw_.tensor_lr", lambda *_, **__: None, "Meta")

Operation = tuple[str, tuple[tuple[torch.Size, torch.dtype, str], ...]]


class Operations(TorchDispatchMode):
    """Records the name of every operation in a context, and the properties of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self.seen: list[Operation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        kinds = tuple((t.shape, t.dtype, t.device.type) for t in tensors)
        self.functions.append(function)
        self.seen.append((str(function), kinds))
        return result


class _FromHost(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function is torch.as_tensor and not isinstance(args[0], Tensor)
        if made or function in FROM_HOST:
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Treat CPU tensors like GPU tensors within a context: predicates are not read on the host."""
    with patch("spectral.rules.muon.unless_all", lambda predicate: predicate):
        yield


@contextlib.contextmanager
def without_eigensolvers() -> Iterator[None]:
    """Compute small problems and norms on the CPU in the same way as on a GPU within a context."""
    with (
        patch("spectral.polar.is_known", lambda tensor: False),
        patch("spectral.singular_triplets.is_known", lambda tensor: False),
        patch("spectral.tangent_model.is_known", lambda tensor: False),
    ):
        yield


def traced(call: Callable[[], object]) -> list[Operation]:
    """Trace a call. Raises AssertionError if an operation creates a tensor from host values, needs
    the value of a result, or mixes tensors on two devices.

    CPU tensors stand in for GPU tensors, so checks that only run on a CPU are skipped.
    """
    with as_on_a_device(), without_eigensolvers(), _FromHost() as host, Operations() as operations:
        call()
    assert not host.seen, host.seen
    for name, kinds in operations.seen:
        assert not any(value in name for value in VALUES), name
        assert len({device for _, _, device in kinds}) <= 1, (name, kinds)
    return operations.seen


def on_meta(root: Any) -> None:
    """Move every tensor reachable from `root`, through objects and containers, to the meta device.
    Shared tensors stay shared."""
    _Mover().move(root)


class _Mover:
    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}  # keeps old tensors alive, so ids stay unique

    def move(self, value: Any) -> Any:
        """Return `value` or its replacement."""
        if id(value) in self.known:
            return self.known[id(value)][1]
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            parts = [self.move(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        new = self._moved(value) if isinstance(value, Tensor) else value
        self.known[id(value)] = value, new
        if isinstance(value, Tensor):
            return new
        if isinstance(value, list):
            value[:] = [self.move(each) for each in value]
        elif isinstance(value, dict):
            moved = [(self.move(key), self.move(each)) for key, each in value.items()]
            value.clear()
            value.update(moved)
        elif type(value).__module__.split(".")[0] in OURS and hasattr(value, "__dict__"):
            for name, each in list(vars(value).items()):
                moved_each = self.move(each)
                if moved_each is not each:
                    vars(value)[name] = moved_each
        return value

    def _moved(self, value: Tensor) -> Tensor:
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if value.is_leaf and value.grad is not None:
            new.grad = self.move(value.grad)
        return new
