"""Update rules, one file per rule, and the registry that maps their names to classes.

An installed package adds rules through entry points in the group `spectrain.rules`. Programs that
only use the library can call `register_rule` instead.
"""

import sys
import warnings
from collections import UserDict
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from .adamuon import AdaMuonRule
from .adamw import AdamWRule
from .base import (
    Report,
    Rule,
    Stack,
    State,
    Step,
    class_problems,
    decay_,
    require_choice,
    subtract_,
    take_step,
)
from .muon import MomentumRule, MsignRule, MuonRule, PolarRule
from .muon_plus_plus import MuonPlusPlusRule
from .muon_sphere import MuonSphereRule
from .normuon import NorMuonRule
from .spectral_descent import SpectralDescentRule
from .spectral_sphere import SpectralSphereRule

ENTRY_POINTS = "spectrain.rules"


class Registry(UserDict[str, type[Rule]]):
    """Maps names to rules.

    Rules from other installed packages are only loaded when names are listed or an unregistered
    name is looked up, because these packages may import this package. `left_out` maps the name of
    each unusable rule to the reason why it is unusable.
    """

    loading = False

    def __init__(self, **rules: type[Rule]) -> None:
        super().__init__(**rules)
        self.left_out: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        """Yield all names; names from other installed packages come last."""
        self.load()
        return iter(self.data)

    def __len__(self) -> int:
        """Return the number of names."""
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Return whether a rule with this name is registered or installed."""
        if name in self.data or name in list(self):
            return True
        installed.cache_clear()  # a package may have been installed since
        return name in list(self)

    def __missing__(self, name: str) -> type[Rule]:
        """Return an installed package's rule; raise ValueError for an unknown name."""
        if name not in self and name in self.left_out:
            raise ValueError(self.left_out[name])
        require_choice("rule", name, tuple(self))
        return self.data[name]

    def load(self) -> None:
        """Register the rules of installed packages, and warn about each unusable rule."""
        if self.loading:  # a package may list the rules while being imported
            return
        self.loading = True
        try:
            for entry in installed(tuple(sys.path)):
                try:
                    register_rule(entry.name, entry.load())
                    self.left_out.pop(entry.name, None)
                except (
                    Exception
                ) as error:  # other packages may raise anything, and few programs need their rules
                    text = (
                        f"{entry.value} is ignored because it is not a rule of {__name__}: {error}"
                    )
                    if self.left_out.get(entry.name) != text:
                        self.left_out[entry.name] = text
                        warnings.warn(text, stacklevel=3)
        finally:
            self.loading = False


@lru_cache(maxsize=1)
def installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the rule entry points of the packages on `path`, i.e. sys.path."""
    return tuple(entry_points(group=ENTRY_POINTS))


RULES = Registry(
    adamw=AdamWRule,
    muon=MuonRule,
    normuon=NorMuonRule,
    adamuon=AdaMuonRule,
    muon_sphere=MuonSphereRule,
    spectral_sphere=SpectralSphereRule,
    muon_plus_plus=MuonPlusPlusRule,
    spectral_descent=SpectralDescentRule,
)


def register_rule(name: str, rule: type[Rule]) -> None:
    """Register a rule under a name, for optimizers and configs.

    Raises:
        ValueError: if the name is taken by another rule.
        TypeError: if `rule` is not a subclass of `Rule` or violates the requirements of `Rule`.
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(f"rule {name!r} must be a class derived from {__name__}.Rule, got {rule!r}")
    if problem := next(class_problems(rule), None):
        raise TypeError(f"rule {name!r} {problem}")
    if RULES.data.setdefault(name, rule) is not rule:
        raise ValueError(f"rule {name!r} is already registered, as {RULES[name].__name__}")


__all__ = [
    "RULES",
    "AdaMuonRule",
    "AdamWRule",
    "MomentumRule",
    "MsignRule",
    "MuonPlusPlusRule",
    "MuonRule",
    "MuonSphereRule",
    "NorMuonRule",
    "PolarRule",
    "Report",
    "Rule",
    "SpectralDescentRule",
    "SpectralSphereRule",
    "Stack",
    "State",
    "Step",
    "decay_",
    "register_rule",
    "subtract_",
    "take_step",
]
