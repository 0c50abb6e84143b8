"""Update rules, one file each, and the registry by which configs name them."""

from spectral.rules.adamw import AdamWRule
from spectral.rules.base import Report, Rule, State
from spectral.rules.muon import MuonRule
from spectral.rules.muon_sphere import MuonSphereRule
from spectral.rules.spectral_sphere import SpectralSphereRule

RULES: dict[str, type[Rule]] = {
    "adamw": AdamWRule,
    "muon": MuonRule,
    "muon_sphere": MuonSphereRule,
    "spectral_sphere": SpectralSphereRule,
}

__all__ = [
    "RULES",
    "AdamWRule",
    "MuonRule",
    "MuonSphereRule",
    "Report",
    "Rule",
    "SpectralSphereRule",
    "State",
]
