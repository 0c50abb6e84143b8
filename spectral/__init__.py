"""Optimizers and layers that control the spectrum of weight matrices."""

from .cuda_graph import CapturedStep
from .gram_penalty import gram_penalty
from .optimizer import SpectralOptimizer
from .parameter_split import ParameterSplit, split_parameters
from .pc_layers import PCLinear, merge_, preconditioned
from .polar import msign
from .qk_clip import clip_qk_
from .rule_optimizers import (
    AdaMuon,
    AdamW,
    Muon,
    MuonPlusPlus,
    MuonSphere,
    NorMuon,
    SpectralDescent,
    SpectralSphere,
)
from .singular_triplets import top_singular
from .tangent import solve_multiplier

__version__ = "0.2.0"
__all__ = [
    "AdaMuon",
    "AdamW",
    "CapturedStep",
    "Muon",
    "MuonPlusPlus",
    "MuonSphere",
    "NorMuon",
    "PCLinear",
    "ParameterSplit",
    "SpectralDescent",
    "SpectralOptimizer",
    "SpectralSphere",
    "clip_qk_",
    "gram_penalty",
    "merge_",
    "msign",
    "preconditioned",
    "solve_multiplier",
    "split_parameters",
    "top_singular",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
