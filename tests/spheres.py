"""Weights on the sphere of the SSO paper."""

import math

import torch
from torch import Tensor


def on_sphere(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian matrices `[..., rows, cols]` of spectral norm sqrt(rows / cols)."""
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    norm = torch.linalg.matrix_norm(weight.double(), ord=2, keepdim=True)
    return weight * (math.sqrt(shape[-2] / shape[-1]) / norm).to(dtype)
