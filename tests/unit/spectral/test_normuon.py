"""NorMuon: its rows, and the numbers of the published code."""

import torch

from spectral.rules import NorMuonRule, take_step


def test_two_steps_give_the_numbers_of_dion() -> None:
    """microsoft/dion at 0a059a4: `_normuon_normalization_core` of the same directions."""
    rule = NorMuonRule()
    weight = torch.arange(12, dtype=torch.float64).view(1, 3, 4).sin()
    state = rule.init_state(weight)
    for step in range(2):
        grad = (torch.arange(12, dtype=torch.float64).view(1, 3, 4) * (step + 2)).cos()
        take_step(rule, weight, grad, state, lr=0.1, weight_decay=0.1)
    expected = [
        [-0.1272110637, 0.8648490651, 0.9321596071, 0.11824136],
        [-0.7227547099, -0.839488927, -0.3823041209, 0.6365865539],
        [1.0171770541, 0.3373575266, -0.5735457543, -0.8571675206],
    ]
    torch.testing.assert_close(
        weight[0], torch.tensor(expected, dtype=torch.float64), atol=2e-10, rtol=0
    )


def test_rows_of_different_gradients_move_alike() -> None:
    """A neuron whose gradient is almost nothing gets rows of the others' size."""
    rule, generator = NorMuonRule(beta2=0.0), torch.Generator().manual_seed(0)
    weight = torch.zeros(1, 40, 8, dtype=torch.float64)
    grad = torch.randn(1, 40, 8, generator=generator, dtype=torch.float64)
    grad[:, ::2] *= 1e-2
    take_step(rule, weight, grad, rule.init_state(weight), lr=1.0)
    size = weight.norm(dim=-1)
    torch.testing.assert_close(size, size.mean().expand_as(size), rtol=1e-5, atol=0)  # epsilon
