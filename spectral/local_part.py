"""This rank's part of tensors that may be sharded, without importing what knows of ranks."""

import sys
from typing import Any, TypeGuard

from torch import Tensor


def is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor. None exists before somebody has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, the memory itself; all of a plain tensor."""
    # In this order: detaching a DTensor takes ten times as long.
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, placed as its parameter is."""
    grad = parameter.grad
    assert grad is not None  # only parameters with gradients are stepped
    if is_dtensor(parameter) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = grad.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local_of(grad)


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered from the ranks that share it; gradients flow back.

    Every rank goes on with the whole tensor, so the gradients that come back are equal on all.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def placed_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return `local`, this rank's part, as a tensor of the shape and placements of `parameter`."""
    if not is_dtensor(parameter):
        return local
    return type(parameter).from_local(  # type: ignore[no-any-return]
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def placed_as(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has as a tensor with the placements of `like`; gradients
    flow back."""
    if not is_dtensor(like):
        return whole
    replicated = type(like).from_local(whole, like.device_mesh, run_check=False)
    return replicated.redistribute(placements=like.placements)  # type: ignore[no-any-return]
