"""Update rules, one file each, and the registry by which configs and optimizers name them.

An installed package adds rules by an entry point of the group `spectrain.rules`; a program that
uses the library alone may call `register_rule`.
"""

from importlib.metadata import entry_points

from .adamuon import AdaMuonRule
from .adamw import AdamWRule
from .base import Report, Rule, Stack, State, Step, take_step
from .momentum import MomentumRule
from .muon import MuonRule
from .muon_plus_plus import MuonPlusPlusRule
from .muon_sphere import MuonSphereRule
from .normuon import NorMuonRule
from .spectral_descent import SpectralDescentRule
from .spectral_sphere import SpectralSphereRule

RULES: dict[str, type[Rule]] = {
    "adamw": AdamWRule,
    "muon": MuonRule,
    "normuon": NorMuonRule,
    "adamuon": AdaMuonRule,
    "muon_sphere": MuonSphereRule,
    "spectral_sphere": SpectralSphereRule,
    "muon_plus_plus": MuonPlusPlusRule,
    "spectral_descent": SpectralDescentRule,
}

ENTRY_POINTS = "spectrain.rules"


def register_rule(name: str, rule: type[Rule]) -> None:
    """Make a rule known to optimizers and configs by a name.

    Raises:
        ValueError: another rule has the name.
        TypeError: `rule` is not a class derived from `Rule`.
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(f"rule {name!r} must be a class derived from Rule, got {rule!r}")
    if RULES.setdefault(name, rule) is not rule:
        raise ValueError(f"rule {name!r} is registered already, as {RULES[name].__name__}")


__all__ = [
    "RULES",
    "AdaMuonRule",
    "AdamWRule",
    "MomentumRule",
    "MuonPlusPlusRule",
    "MuonRule",
    "MuonSphereRule",
    "NorMuonRule",
    "Report",
    "Rule",
    "SpectralDescentRule",
    "SpectralSphereRule",
    "Stack",
    "State",
    "Step",
    "register_rule",
    "take_step",
]

for entry in entry_points(group=ENTRY_POINTS):
    register_rule(entry.name, entry.load())
