"""This rank's part of tensors that may be sharded, without importing what knows of ranks."""

import sys

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. None exists before somebody has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, the memory itself; all of a plain tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, placed as its parameter is."""
    grad = parameter.grad
    assert grad is not None  # only parameters with gradients are stepped
    if is_dtensor(parameter):
        grad = grad.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local_of(grad)
