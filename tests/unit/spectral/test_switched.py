"""The rule that chooses between two rules, against each of them by itself."""

import pytest
import torch

from spectral.rules import AdamWRule, MuonRule, SpectralSphereRule
from spectral.rules.switched import SwitchedRule, of_rule


def switched(**options: float) -> SwitchedRule:
    return SwitchedRule(spectral=MuonRule(), elementwise=AdamWRule(), lr_ratio=0.1, **options)


def test_each_matrix_is_stepped_by_its_rule_and_both_states_are_updated() -> None:
    rule = switched(elementwise_weight_decay=0.3)
    start = torch.randn(3, 6, 5, dtype=torch.float64)
    mixed, muon, adamw = start.clone(), start.clone(), start.clone()
    state = rule.init_state(mixed)
    states = rule.spectral.init_state(muon), rule.elementwise.init_state(adamw)
    state["on_spectral"][1] = 0
    for _ in range(3):
        gradient = torch.randn_like(start)
        report = rule.step(mixed, gradient.clone(), state, lr=0.1, weight_decay=0.2)
        rule.spectral.step(muon, gradient.clone(), states[0], lr=0.1, weight_decay=0.2)
        rule.elementwise.step(adamw, gradient.clone(), states[1], lr=0.01, weight_decay=0.3)
    assert torch.equal(mixed[[0, 2]], muon[[0, 2]])
    torch.testing.assert_close(mixed[1], adamw[1], rtol=1e-12, atol=0)
    for prefix, own in zip(("spectral_", "elementwise_"), states, strict=True):
        for name, value in of_rule(state, prefix).items():
            assert torch.equal(value, own[name])
    assert report["on_spectral"].tolist() == [1, 0, 1]


def test_a_skipped_step_changes_nothing() -> None:
    rule = SwitchedRule(spectral=SpectralSphereRule(), elementwise=AdamWRule(), lr_ratio=1.0)
    weight = torch.randn(2, 6, 5)
    state = rule.init_state(weight)
    state["on_spectral"][1] = 0
    rule.step(weight, torch.randn_like(weight), state, lr=0.1)
    kept = weight.clone(), {name: value.clone() for name, value in state.items()}
    nan = torch.full_like(weight, torch.nan)
    rule.step(weight, nan, state, lr=0.1, active=torch.tensor(False))
    assert torch.equal(weight, kept[0])
    assert all(torch.equal(value, kept[1][name]) for name, value in state.items())


def test_the_smoothed_ratio_decides_with_hysteresis() -> None:
    rule = switched(smoothing=0.5, hysteresis=0.25)
    state = rule.init_state(torch.zeros(1, 4, 3))
    seen = []
    # The first ratio counts alone, the mean is of logarithms: 0.25, 0.5, 1, 1.19, 1.27, then none.
    for ratio in (0.25, 1.0, 2.0, 2.0**0.5, 1.36, torch.nan, 0.55, 0.5):
        rule.observe_(state, torch.tensor([ratio]))
        seen.append((round(state["criterion"].exp().item(), 2), int(state["on_spectral"].item())))
    assert seen == [
        (0.25, 0), (0.5, 0), (1.0, 0), (1.19, 0), (1.27, 1), (1.27, 1), (0.84, 1), (0.65, 0),
    ]  # fmt: skip
    assert state["measured"].item() == 7


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="lr_ratio must be positive, got 0"):
        SwitchedRule(spectral=MuonRule(), elementwise=AdamWRule(), lr_ratio=0)
    with pytest.raises(ValueError, match="spectral must be a rule of whole matrices"):
        SwitchedRule(spectral=AdamWRule(), elementwise=AdamWRule(), lr_ratio=1.0)
