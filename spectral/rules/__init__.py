"""Update rules, one file each, and the registry by which configs name them."""

from .adamw import AdamWRule
from .base import Report, Rule, Stack, State, Step, take_step
from .muon import MuonRule
from .muon_plus_plus import MuonPlusPlusRule
from .muon_sphere import MuonSphereRule
from .spectral_descent import SpectralDescentRule
from .spectral_sphere import SpectralSphereRule

RULES: dict[str, type[Rule]] = {
    "adamw": AdamWRule,
    "muon": MuonRule,
    "muon_sphere": MuonSphereRule,
    "spectral_sphere": SpectralSphereRule,
    "muon_plus_plus": MuonPlusPlusRule,
    "spectral_descent": SpectralDescentRule,
}

__all__ = [
    "RULES",
    "AdamWRule",
    "MuonPlusPlusRule",
    "MuonRule",
    "MuonSphereRule",
    "Report",
    "Rule",
    "SpectralDescentRule",
    "SpectralSphereRule",
    "Stack",
    "State",
    "Step",
    "take_step",
]
