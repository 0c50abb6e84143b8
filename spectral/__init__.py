"""Optimizers and layers that control the spectrum of weight matrices. Tensors in, tensors out."""

from spectral.cuda_graph import CapturedStep
from spectral.msign_many import msign_many
from spectral.optimizer import (
    AdamW,
    Muon,
    MuonPlusPlus,
    MuonSphere,
    SpectralDescent,
    SpectralOptimizer,
    SpectralSphere,
    split_parameters,
)
from spectral.polar import msign
from spectral.power_iteration import top_singular
from spectral.tangent import solve_multiplier

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
