"""What the host may read of a device's values at no cost."""

import torch
from torch import Tensor


def is_known(*tensors: Tensor) -> bool:
    """Return whether reading values does not wait: on a CPU, outside of a compiled graph."""
    # A fake tensor, for one, has no value.
    on_cpu = all(x.is_cpu and type(x) is Tensor for x in tensors)
    return on_cpu and not torch.compiler.is_compiling()


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
    known = is_known(*tensors)
    return known and bool(torch.stack(torch._foreach_norm(tensors)).isfinite().all())
