"""AdaMuon, NorMuon and cautious weight decay, compared with numbers from the published code."""

import pytest
import torch
from torch import Tensor

from spectral.rules import AdaMuonRule, MuonRule, NorMuonRule, Rule, take_step
from spectral.rules.base import decay_

# Chongjie-Si/AdaMuon at 369f0b3, and of microsoft/dion at 0a059a4 `muon_update_post_orthogonalize`
# with cautious_wd and `_normuon_normalization_core`, in float64 with the polar factors of msign.
PUBLISHED: dict[str, tuple[Rule, float, list[list[float]]]] = {
    "adamuon": (
        AdaMuonRule(),
        0.1,
        [
            [-0.0398185329, 0.8645442451, 0.8909838746, 0.1385302533],
            [-0.7383574910, -0.9036263153, -0.3100704961, 0.6405279308],
            [1.0124872736, 0.3611000713, -0.5760123469, -0.9372731453],
        ],
    ),
    "muon cautious": (
        MuonRule(cautious_decay=True),
        0.5,
        [
            [-0.1193764197, 0.8791318193, 0.9464283482, 0.1176344192],
            [-0.6618159103, -0.7531135100, -0.4035248470, 0.6151771036],
            [1.0322177199, 0.3116536967, -0.5819322644, -0.7892161830],
        ],
    ),
    "normuon": (
        NorMuonRule(),
        0.1,
        [
            [-0.1272110637, 0.8648490651, 0.9321596071, 0.1182413600],
            [-0.7227547099, -0.8394889270, -0.3823041209, 0.6365865539],
            [1.0171770541, 0.3373575266, -0.5735457543, -0.8571675206],
        ],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_two_steps_give_the_numbers_of_the_published_code(name: str) -> None:
    rule, decay, expected = PUBLISHED[name]
    weight = torch.arange(12, dtype=torch.float64).view(1, 3, 4).sin()
    state = rule.init_state(weight)
    for step in range(2):
        grad = (torch.arange(12, dtype=torch.float64).view(1, 3, 4) * (step + 2)).cos()
        take_step(rule, weight, grad, state, lr=0.1, weight_decay=decay)
    # The published AdaMuon divides by its norm and an epsilon of 1e-8.
    atol = 1e-8 if name == "adamuon" else 2e-10
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(weight[0], wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_an_entry_that_the_update_keeps_is_decayed(lr: float | Tensor) -> None:
    """test_references.py compares steps with entries of both signs."""
    weight = torch.ones(3)
    decay_(weight, lr, 0.5, None, torch.tensor([1.0, 0.0, -1.0]))
    assert weight.tolist() == pytest.approx([0.95, 0.95, 1])
