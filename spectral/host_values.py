"""What the host may read of a device's values at no cost."""

import torch
from torch import Tensor


def is_known(tensor: Tensor) -> bool:
    """Return whether reading a value does not wait: on a CPU, outside of a compiled graph."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return type(tensor) is Tensor  # a fake tensor, for one, has no value


def unless_all(predicate: Tensor | None) -> Tensor | None:
    """Return `predicate`, or None where the host knows at no cost that all of it is True.

    With None, passes over memory that only keep what they find are left out.
    """
    if predicate is None or not is_known(predicate):
        return predicate
    return None if bool(predicate.all()) else predicate
