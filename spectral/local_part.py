"""Access to this rank's part of parameters and gradients, without importing torch.distributed."""

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    """Return whether a tensor is a DTensor, without importing the DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def rank_and_count() -> tuple[int, int]:
    """Return this rank and the number of ranks in the job, without importing torch.distributed."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return 0, 1
    return module.get_rank(), module.get_world_size()


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself, without copying."""
    # Detach last: detaching a DTensor takes ten times as long.
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, redistributed to the parameter's placements."""
    grad = parameter.grad
    assert grad is not None  # only parameters with gradients are stepped
    if is_dtensor(parameter) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = grad.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local_of(grad)


def gradients_of(
    parameters: Sequence[Tensor], shapes: Sequence[torch.Size], *, sharded: bool
) -> list[Tensor]:
    """Return all existing gradients or, if `sharded`, this rank's parts of the gradients.

    `shapes` are the shapes of all parameters. Raises ValueError if a gradient is sparse, or if its
    shape or type (DTensor or plain tensor) does not match the parameter.
    """
    grads = []
    for parameter, shape in zip(parameters, shapes, strict=True):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise ValueError(f"gradients must be dense, got {grad.layout}")
        if grad.shape != shape:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(shape)} must have the same shape, "
                f"got {tuple(grad.shape)}"
            )
        if sharded and is_dtensor(grad) != is_dtensor(parameter):
            raise ValueError(
                "the gradient of a DTensor must be a DTensor, and the gradient of a plain tensor "
                "must be a plain tensor"
            )
        grads.append(local_of(grad) if sharded else grad)
    return grads


def placed_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Wrap `local`, this rank's part, in a tensor with the shape and placements of `parameter`."""
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
    """Distribute a replicated tensor with the placements of `like`; differentiable."""
    if not is_dtensor(like):
        return whole
    replicated = type(like).from_local(whole, like.device_mesh, run_check=False)
    return replicated.redistribute(placements=like.placements)  # type: ignore[no-any-return]
