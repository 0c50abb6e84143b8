"""What the host may read of a device's values at no cost."""

from itertools import compress
from math import isfinite
from operator import not_

import torch
from torch import Tensor

SMALL = 2**12
"""Bytes up to which copying a tensor takes less time than a call for its norm."""


def is_known(*tensors: Tensor) -> bool:
    """Return whether reading values does not wait: on a CPU, outside of a compiled graph."""
    # A fake tensor, for one, has no value.
    plain = {*map(type, tensors)} <= {Tensor} and all(x.is_cpu for x in tensors)
    return plain and not torch.compiler.is_compiling()


def unless_all(predicate: Tensor | None) -> Tensor | None:
    """Return `predicate`, or None where the host knows at no cost that all of it is True.

    With None, passes over memory that only keep what they find are left out.
    """
    if predicate is None or not is_known(predicate):
        return predicate
    return None if bool(predicate.all()) else predicate


def surely_finite(tensors: list[Tensor]) -> bool:
    """Return whether the host knows without a wait that all elements are finite.

    By norms, which NaN and infinity do not leave finite; those of huge numbers may not be either. A
    norm takes half the time of extremes, and a twentieth of that of `isfinite`.
    """
    if not is_known(*tensors):
        return False
    sizes = [x.nbytes for x in tensors]
    if min(sizes) <= SMALL:
        small = [size <= SMALL for size in sizes]
        joined = torch._utils._flatten_dense_tensors([*compress(tensors, small)])
        tensors = [joined, *compress(tensors, map(not_, small))]
    return isfinite(torch.stack(torch._foreach_norm(tensors)).sum())
