"""Optimizers and layers that control the spectrum of every weight matrix. Tensors in, tensors out."""

from spectral.polar import msign
from spectral.power_iteration import top_singular
from spectral.tangent import solve_multiplier

__all__ = ["msign", "solve_multiplier", "top_singular"]
