"""Update rules, one file each, and the registry by which configs and optimizers name them.

An installed package adds rules by an entry point of the group `spectrain.rules`, which is loaded
when a name is not known: the package may be what imports this one. A program that uses the library
alone may call `register_rule`.
"""

import warnings
from importlib.metadata import entry_points

from .accepted_values import require_choice
from .adamuon import AdaMuonRule
from .adamw import AdamWRule
from .base import Report, Rule, Stack, State, Step, class_problems, take_step
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
        TypeError: `rule` is not a class derived from `Rule`, or lacks what one must have.
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(f"rule {name!r} must be a class derived from {__name__}.Rule, got {rule!r}")
    if problem := next(class_problems(rule), None):
        raise TypeError(f"rule {name!r} {problem}")
    if RULES.setdefault(name, rule) is not rule:
        raise ValueError(f"rule {name!r} is registered already, as {RULES[name].__name__}")


def load_rules() -> None:
    """Register the rules of installed packages, with a warning for each that cannot be used."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register_rule(entry.name, entry.load())
        except Exception as error:  # another package's code, which most programs do not need
            text = f"{entry.value} is left out, as it is no rule of {__name__}: {error}"
            warnings.warn(text, stacklevel=2)


def rule_named(name: str) -> type[Rule]:
    """Return the rule of a name; raises ValueError for an unknown one."""
    if name not in tuple(RULES):
        load_rules()
    require_choice("rule", name, tuple(RULES))
    return RULES[name]


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
    "load_rules",
    "register_rule",
    "rule_named",
    "take_step",
]
