"""A rule based on `PolarRule`, as described in CONTRIBUTING, and a rule whose `update` forgets to
return reports."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spectral import SpectralOptimizer
from spectral.rules import RULES, PolarRule, Report, Stack, take_step


@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 4, 4)])
def test_the_update_of_the_page_is_muons(root: Path, shape: tuple[int, ...]) -> None:
    page = (root / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"`(return self\.apply\(.*?\))`", page)
    names: dict[str, Any] = {}
    exec(f"def update(self, stacks):\n    {line}", names)
    rules = type("PageRule", (PolarRule,), {"update": names["update"]})(), RULES["muon"]()
    start, grad = torch.randn(shape), torch.randn(shape)
    weights = [start.clone() for _ in rules]
    reports = [
        take_step(rule, weight, grad.clone(), rule.init_state(weight), lr=0.1, weight_decay=0.1)
        for rule, weight in zip(rules, weights, strict=True)
    ]
    assert torch.equal(*weights)
    assert reports[0].keys() == reports[1].keys()


@pytest.mark.parametrize("reports", [{"rms": torch.zeros(1)}, [], None])
def test_an_update_without_one_report_per_stack_is_named(reports: Any) -> None:
    class ForgetfulRule(PolarRule):
        def update(self, stacks: Sequence[Stack]) -> list[Report]:
            return reports  # type: ignore[no-any-return]

    RULES.data["forgetful"] = ForgetfulRule
    try:
        weight = torch.nn.Parameter(torch.ones(3, 2))
        weight.grad = torch.ones_like(weight)
        optimizer = SpectralOptimizer([weight], rule="forgetful", lr=0.1)
        with pytest.raises(TypeError, match=r"ForgetfulRule.update must return a list of 1"):
            optimizer.step()
    finally:
        del RULES.data["forgetful"]
