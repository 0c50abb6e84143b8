"""What a step asks of its gradients: dense, of their parameters' shapes, and finite."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise ValueError for parameters and gradients that no step can be taken with."""
    for parameter, grad in pairs:
        if grad.layout is not torch.strided:
            raise ValueError(f"gradients must be dense, got {grad.layout}")
        if grad.shape != parameter.shape:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} must be of that "
                f"shape, got {tuple(grad.shape)}"
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
