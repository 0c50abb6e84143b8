"""Optimizers and layers that control the spectrum of weight matrices. Tensors in, tensors out."""

from .cuda_graph import CapturedStep
from .msign_many import msign_many
from .optimizer import (
    AdamW,
    Muon,
    MuonPlusPlus,
    MuonSphere,
    SpectralDescent,
    SpectralOptimizer,
    SpectralSphere,
    split_parameters,
)
from .polar import msign
from .power_iteration import top_singular
from .tangent import solve_multiplier

__all__ = [
    "AdamW",
    "CapturedStep",
    "Muon",
    "MuonPlusPlus",
    "MuonSphere",
    "SpectralDescent",
    "SpectralOptimizer",
    "SpectralSphere",
    "msign",
    "msign_many",
    "solve_multiplier",
    "split_parameters",
    "top_singular",
]
