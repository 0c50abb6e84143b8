"""An unusable rule in an installed package causes one warning. Errors about the rule's name contain
the reason."""

import warnings
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from spectral import SpectralOptimizer, rules
from spectral.rules import RULES, MsignRule
from tests.minimal_config import problems


@dataclass(frozen=True, kw_only=True)
class NoMomentumRule(MsignRule):
    """A rule that defines neither `init_state` nor `update`."""


@dataclass(frozen=True)
class Entry:
    """A fake entry point, as returned by importlib.metadata."""

    name: str = "unusable"
    value: str = "package:NoMomentumRule"

    def load(self) -> type[MsignRule]:
        return NoMomentumRule


@pytest.fixture
def reason(monkeypatch: pytest.MonkeyPatch) -> str:
    """List the rules twice, check that there is a single warning, and return its reason."""
    monkeypatch.setattr(rules, "installed", cache(lambda path: [Entry()]))
    monkeypatch.setattr(RULES, "left_out", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [*RULES] == [*RULES] and "unusable" not in RULES
    (text,) = (str(each.message) for each in caught if "is ignored" in str(each.message))
    assert text.startswith("package:NoMomentumRule") and "must implement the method" in text
    return text


def test_an_optimizer_states_why(reason: str) -> None:
    with pytest.raises(ValueError, match="must implement the method") as caught:
        SpectralOptimizer([torch.nn.Parameter(torch.zeros(2, 3))], rule="unusable", lr=0.1)
    assert reason in str(caught.value)


@pytest.mark.parametrize("key", ["matrix.rule=unusable", "rules.unusable.steps=4"])
def test_a_config_states_why(reason: str, key: str, minimal) -> None:
    (problem,) = problems(minimal, f"optimizer.{key}")
    assert problem.endswith(reason) and "install its package" not in problem
