"""Constants that are copied to each device once, and checks that never cause a host sync."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import compress
from math import isfinite
from operator import not_
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

MOST_RESULTS = 4096


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results, and mark the function in the same way as
    `torch.compiler.assume_constant_result`.

    torch's decorator is not used because it imports the compiler, which takes as long as importing
    torch. Tensors in the results are copied to their device only once: copying them in every step
    would cause a sync and prevent capture as a CUDA graph. Do not modify these tensors.
    """
    cached = lru_cache(MOST_RESULTS)(function)

    @wraps(function)
    def result(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    result._dynamo_marked_constant = True  # type: ignore[attr-defined]
    result.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return result


@constant_result
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` as a tensor, which must not be modified."""
    return torch.tensor(values, dtype=dtype, device=device)


SMALL = 2**12
"""Size in bytes up to which copying a tensor is faster than computing its norm."""


def is_known(*tensors: Tensor) -> bool:
    """Return whether values can be read without a sync: true on CPU outside compiled graphs."""
    # Tensor subclasses such as fake tensors may not have values.
    plain = {*map(type, tensors)} <= {Tensor} and all(x.is_cpu for x in tensors)
    return plain and not torch.compiler.is_compiling()


def unless_all(predicate: Tensor | None) -> Tensor | None:
    """Return None if `predicate` is all True, else `predicate`.

    Callers restore old values where the result is False, and skip this pass over memory if the
    result is None. If the check would require a host sync, the result is `predicate`.
    """
    if predicate is None or not is_known(predicate):
        return predicate
    return None if bool(predicate.all()) else predicate


def surely_finite(tensors: list[Tensor]) -> bool:
    """Return True if a check without a host sync shows that all elements are finite, else False.

    The check computes norms, which are nonfinite if an element is NaN or infinite. May return False
    for huge finite values, whose norm overflows. A norm takes half the time of `aminmax` and a
    twentieth of the time of `isfinite`.
    """
    if not is_known(*tensors):
        return False
    sizes = [x.nbytes for x in tensors]
    if min(sizes) <= SMALL:
        small = [size <= SMALL for size in sizes]
        joined = torch._utils._flatten_dense_tensors([*compress(tensors, small)])
        tensors = [joined, *compress(tensors, map(not_, small))]
    return isfinite(torch.stack(torch._foreach_norm(tensors)).sum())


def are_finite(tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Return whether all elements are finite, as a 0-d bool on `device`.

    `device` defaults to the device of the first tensor. The check computes extreme values, because
    a Euclidean norm could overflow.
    """
    device = tensors[0].device if device is None else device
    filled = [tensor for tensor in tensors if tensor.numel()]  # empty tensors have no maximum
    if not filled:
        return torch.ones((), dtype=torch.bool, device=device)
    if device.type == "cpu":
        extremes = [x for tensor in filled for x in torch.aminmax(tensor)]
    else:
        extremes = list(torch._foreach_norm(filled, math.inf))
    return torch.stack([x.to(device, torch.float64) for x in extremes]).isfinite().all()
