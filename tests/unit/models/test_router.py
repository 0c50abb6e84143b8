"""The routed scale, compared with the paper and a closed form; MaxVio, compared with values
computed by hand; and the expert bias of a router that prefers one expert."""

from math import sqrt

import pytest
import torch

from models.blocks.experts import balance_, max_violation, routers, token_counts
from models.config import routed_scale
from tests.models import drawn
from tests.tiny_families import mixture


def test_routed_scale_is_that_of_the_paper():
    # The paper's listing draws 63 (64 experts without the shared one), its model has 64.
    assert routed_scale(63, 4, 1) == pytest.approx(1.998, abs=1e-3)
    assert routed_scale(64, 4, 1) == pytest.approx(1.998, abs=1e-3)
    assert routed_scale(64, 4, 4) == pytest.approx(2 * 1.998, abs=2e-3)


def test_routed_scale_of_even_gates_is_closed_form():
    assert routed_scale(4, 4, 1) == pytest.approx(sqrt(4), rel=0.1)
    assert routed_scale(8, 2, 0) == 1.0
    # A single expert keeps its score, the largest sigmoid of 512 normal logits, about 0.95.
    assert routed_scale(512, 1, 1) == pytest.approx(1 / 0.95, abs=0.01)


def test_max_violation_by_hand():
    counts = torch.tensor([[4.0, 4.0, 4.0, 4.0], [16.0, 0.0, 0.0, 0.0], [6.0, 2.0, 5.0, 3.0]])
    assert max_violation(counts).tolist() == [0.0, 3.0, 0.5]


def skewed():
    """Return a model chunk, and hidden states for which its routers prefer expert 0."""
    chunk, parameters = drawn(mixture())
    direction = torch.nn.functional.normalize(torch.ones(32, dtype=torch.float64), dim=0)
    for layer in (1, 2):
        router = parameters[f"layers.{layer}.router"].data
        router.copy_(
            0.1 * torch.randn(router.shape, generator=torch.Generator().manual_seed(layer))
        )
        router[0] += direction
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(64, 4, 32, generator=generator, dtype=torch.float64) + 2 * direction
    return chunk, hidden


def violations(chunk, hidden, steps, rate):
    """Return MaxVio `[steps, layers]` for consecutive steps on the hidden states `hidden`."""
    found = []
    for _ in range(steps):
        for router in routers([chunk]):
            router(hidden)
        counts = token_counts([chunk])
        assert counts.sum(1).tolist() == [64 * 4 * 2] * 2
        found.append(max_violation(counts))
        balance_([chunk], counts, rate=rate)
    return torch.stack(found)


def test_expert_bias_evens_out_a_skewed_router(world):
    chunk, hidden = skewed()
    course = violations(chunk, hidden, steps=40, rate=0.01)
    assert (course[0] > 0.3).all()
    # The final bias is within a step of the balanced one; a step of 0.01 moves a few tokens of 256.
    assert (course[-5:].mean(0) < 0.25 * course[0]).all()
    for router in routers([chunk]):
        assert router.expert_bias[0] < router.expert_bias[1:].min()
        assert router.expert_bias.dtype == torch.float32


def test_an_inactive_step_moves_no_bias(world):
    chunk, hidden = skewed()
    for router in routers([chunk]):
        router(hidden)
    balance_([chunk], token_counts([chunk]), rate=0.1, active=torch.tensor(False))
    for router in routers([chunk]):
        assert not router.expert_bias.any()
        assert not router.tokens_per_expert.any()


def test_evaluation_is_not_counted(world):
    chunk, hidden = skewed()
    with torch.no_grad():
        routers([chunk])[0](hidden)
    assert not token_counts([chunk]).any()
