"""Update rules, one file each, and the registry by which configs name them."""

from spectral.rules.adamw import AdamWRule
from spectral.rules.base import Report, Rule, State
from spectral.rules.muon import MuonRule
from spectral.rules.muon_plus_plus import MuonPlusPlusRule
from spectral.rules.muon_sphere import MuonSphereRule
from spectral.rules.spectral_descent import SpectralDescentRule
from spectral.rules.spectral_sphere import SpectralSphereRule

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
    "State",
]
