"""Device tensors with shapes but no values. Host tensors are real."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from training.rehearsal.operations import arguments, kind_of, tensors_in, work_of
from training.rehearsal.program import put
from training.rehearsal.trace import Launch, Trace

aten = torch.ops.aten

_SHAPES = torch.library.Library("aten", "IMPL")
"""Shape functions of operations whose shape functions in PyTorch are missing or wrong."""


def efficient_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return gradients with the shapes of `query`, `key` and `value`.

    PyTorch's shape function does not accept all of the kernel's arguments.
    """
    if bias is not None:
        raise NotImplementedError("attention with a bias on the scores cannot be rehearsed")
    return (*(torch.empty_like(x) for x in (query, key, value)), query.new_empty(()))


def value_of(dtype: torch.dtype) -> Any:
    """Return the value that the host reads from any device tensor of type `dtype`: True, 1 or
    1.0."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


class PinnedMemory:
    """Tracks pinned host memory, which the device can copy asynchronously."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}  # start address to end address (exclusive)

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark the memory of `tensor` as pinned until it is freed, and return `tensor`."""
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        self._ranges[first] = first + storage.nbytes()
        weakref.finalize(storage, self._ranges.pop, first, None).atexit = False
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is pinned."""
        address = tensor.data_ptr()
        return any(first <= address < end for first, end in self._ranges.items())


class DeviceTensors(FakeTensorMode):
    """Mode that records operations on device tensors instead of running them.

    Operations that only involve host tensors are run.

    Raises the errors that a real device would raise for operands on different devices and for a
    host read during graph capture.
    """

    avoid_device_init = True

    def __init__(self, trace: Trace) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.trace = trace
        self.pinned = PinnedMemory()
        self.integers = WeakTensorKeyDictionary()
        """Values of integer tensors that were copied to the device. FLOPs depend on some of these
        tensors, such as document lengths."""
        self._inside = False
        # Skip device initialisation.
        put(fake_tensor, "init_gpu_context", lambda device: None)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run or record one operation."""
        kwargs = dict(kwargs or {})
        if self._inside:
            return super().dispatch(func, types, args, kwargs)
        device = kwargs.get("device")
        of_device = device is not None and torch.device(device).type == "cuda"
        of_device = of_device or any(
            isinstance(x, FakeTensor) for x in tensors_in((*args, *kwargs.values()))
        )
        if not isinstance(func, OpOverload) or not of_device:
            pinned = kwargs.pop("pin_memory", False)
            result = func(*args, **kwargs)
            return self.pinned.pin(result) if pinned else result
        if func is aten._local_scalar_dense.default:
            self._read("item", args[0])
            return value_of(args[0].dtype)
        if func is aten.equal.default:
            self._read("equal", *(x for x in args if isinstance(x, FakeTensor)))
            return args[0].shape == args[1].shape
        if func is aten._linalg_check_errors.default:
            info, name = args
            self._read(name, info)
            return None
        if func in (aten._to_copy.default, aten.copy_.default):
            copy = self._to_copy if func is aten._to_copy.default else self._copy
            result = copy(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._traced(func, types, args, kwargs)

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Context manager in which operations only compute the shapes of their results and nothing
        is recorded."""
        before = self._inside, self.trace.muted
        self._inside = self.trace.muted = True
        try:
            yield
        finally:
            self._inside, self.trace.muted = before

    def install(self) -> None:
        """Until this process exits, replace the tensor methods that bypass the dispatcher."""

        def tolist(tensor: Tensor) -> Any:
            self._read("tolist", tensor)
            return np.full(tensor.shape, value_of(tensor.dtype)).tolist()

        _SHAPES.impl("_fused_adamw_.tensor_lr", lambda *_, **__: None, "Meta")
        name = "_efficient_attention_backward"
        _SHAPES.impl(name, efficient_attention_backward, "Meta", allow_override=True)
        put(FakeTensor, "tolist", tolist)
        put(Tensor, "pin_memory", lambda tensor, *_: self.pinned.pin(tensor))
        put(Tensor, "is_pinned", lambda tensor, *_: self.pinned.holds(tensor))

    def _traced(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Record the launch of an operation and return its result."""
        kind = kind_of(func)
        out = self._faked(func, types, args, kwargs)
        results = [x for x in tensors_in(out) if isinstance(x, FakeTensor)]
        reads, writes = arguments(kind, args, kwargs)
        # In-place operations on tensor lists return nothing.
        if kind.silent or all(x.numel() == 0 for x in (*results, *writes)):
            self.trace.touch(results)
            return out
        reads = [x for x in reads if isinstance(x, FakeTensor)]
        writes += [x for x in results if not any(x is w for w in writes)]
        values = [self.integers.get(x, x) if isinstance(x, FakeTensor) else x for x in args]
        work = work_of(
            self.trace.device, func, kind, values, kwargs, reads=reads, writes=writes, out=out
        )
        fakes = [x for x in writes if isinstance(x, FakeTensor)]
        self.trace.launch(Launch(kind.name, reads, fakes, work))
        if work.waiting:
            self.trace.read(kind.name)
        return out

    def _faked(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation on PyTorch's fake tensors."""
        self._inside = True
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self._inside = False

    def _to_copy(self, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        source, device = args[0], kwargs.get("device")
        later = bool(kwargs.get("non_blocking"))
        if not isinstance(source, FakeTensor):
            copy = self._traced(func, types, (self._stand_in(source),), kwargs)
            self._to_device(source, later)
            if source.dtype == torch.int32:
                self.integers[copy] = source
            return copy
        if device is None or torch.device(device).type == "cuda":
            return NotImplemented
        # Copies into PyTorch's pinned memory do not block the host.
        self._to_host(source, waits=not later)
        # Memory of zeros is only allocated on first access, so an unread copy takes none.
        dtype = kwargs.get("dtype") or source.dtype
        kind = "c" if dtype.is_complex else "u"
        bits = np.zeros(tuple(source.shape), f"{kind}{dtype.itemsize}")
        copy = torch.from_numpy(bits).view(dtype)
        return self.pinned.pin(copy) if later else copy

    def _copy(self, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        target, source, *rest = args
        later = bool(rest[0] if rest else kwargs.get("non_blocking"))
        if not isinstance(source, FakeTensor):
            copy = self._traced(func, types, (target, self._stand_in(source), *rest), kwargs)
            self._to_device(source, later)
            return copy
        if isinstance(target, FakeTensor):
            return NotImplemented
        self._to_host(source, waits=not (later and self.pinned.holds(target)))
        return target

    def _read(self, name: str, *tensors: Tensor) -> None:
        """Record a host read, which synchronizes with the current stream."""
        self.trace.launch(Launch.moving(name, tensors))
        self.trace.read(name)

    def _to_device(self, source: Tensor, later: bool) -> None:
        """Record a copy to the device, which blocks the host if `source` is in pageable memory."""
        if not later or not self.pinned.holds(source):
            self.trace.synchronize("copy to the device", self.trace.stream)

    def _to_host(self, source: Tensor, *, waits: bool) -> None:
        self.trace.launch(Launch.moving("copy to the host", [source]))
        if waits:
            self.trace.read("copy to the host")

    def _stand_in(self, source: Tensor) -> Tensor:
        """Create a device tensor with the shape and dtype of a host tensor."""
        return self._faked(
            aten.empty_strided.default,
            (),
            (source.size(), source.stride()),
            {"dtype": source.dtype, "device": torch.device("cuda")},
        )
