"""What a step asks of its gradients: dense, of their parameters' shapes, and finite."""

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from .local_part import is_dtensor, local_of


def gradients_of(
    parameters: Sequence[Tensor], shapes: Sequence[torch.Size], *, sharded: bool
) -> list[Tensor]:
    """Return the gradients of the parameters that have one, this rank's parts if `sharded`.

    `shapes` are those of the parameters. Raises ValueError for gradients that no step can be taken
    with.
    """
    each = [p.grad for p in parameters]
    grads = [grad for grad in each if grad is not None]
    if len(grads) < len(each):
        given = [grad is not None for grad in each]
        parameters, shapes = [*compress(parameters, given)], [*compress(shapes, given)]
    dense = {grad.layout for grad in grads} <= {torch.strided}
    if not dense or [grad.shape for grad in grads] != shapes:
        for grad, shape in zip(grads, shapes, strict=True):
            _check(grad, shape)
    if not sharded:
        return grads
    if [*map(is_dtensor, grads)] != [*map(is_dtensor, parameters)]:
        raise ValueError("the gradient of a DTensor, and of no other, must be a DTensor")
    return [*map(local_of, grads)]


def _check(grad: Tensor, shape: torch.Size) -> None:
    """Raise ValueError for a gradient with which a parameter of a shape cannot be stepped."""
    if grad.layout is not torch.strided:
        raise ValueError(f"gradients must be dense, got {grad.layout}")
    if grad.shape != shape:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(shape)} must be of that shape, got "
            f"{tuple(grad.shape)}"
        )


def are_finite(tensors: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Return whether all elements are finite, a 0-d bool on `device`, None for that of the first.

    By the extremes, which no size of the others makes overflow, as it would a norm.
    """
    device = tensors[0].device if device is None else device
    filled = [tensor for tensor in tensors if tensor.numel()]  # others have no extremes
    if not filled:
        return torch.ones((), dtype=torch.bool, device=device)
    if device.type == "cpu":
        extremes = [x for tensor in filled for x in torch.aminmax(tensor)]
    else:
        extremes = list(torch._foreach_norm(filled, math.inf))
    return torch.stack([x.to(device, torch.float64) for x in extremes]).isfinite().all()
