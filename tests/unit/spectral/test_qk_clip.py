"""QK-clip, compared with the published code."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention

from spectral import clip_qk_

HEADS, GROUPS, SIZE, INPUTS = 4, 2, 3, 5


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(HEADS * SIZE, INPUTS, dtype=torch.float64)
    return query, torch.randn(GROUPS * SIZE, INPUTS, dtype=torch.float64)


@pytest.mark.parametrize("balance", [0, 0.3, 0.5, 1])
def test_it_scales_what_megatron_scales(balance: float) -> None:
    query, key = weights()
    logits = torch.tensor([30.0, 250.0, 20.0, 90.0], dtype=torch.float64)
    attention = SimpleNamespace(
        num_query_groups_per_partition=GROUPS,
        query_projection_size=HEADS * SIZE,
        kv_projection_size=GROUPS * SIZE,
        qk_clip_balancing_eta=torch.tensor([100 / 250, 1.0], dtype=torch.float64).view(2, 1, 1),
        config=SimpleNamespace(qk_clip_alpha=balance),
    )
    value = torch.zeros_like(key)
    fused = torch.cat([x.view(GROUPS, -1, INPUTS) for x in (query, key, value)], dim=1)
    expected = SelfAttention._clip_linear_qkv(attention, fused.reshape(-1, INPUTS).clone())
    factor = clip_qk_(query, key, logits, balance=balance)
    clipped = torch.cat([x.view(GROUPS, -1, INPUTS) for x in (query, key, value)], dim=1)
    torch.testing.assert_close(clipped.reshape(-1, INPUTS), expected)
    assert factor.tolist() == [0.4, 1.0]


def test_weights_of_other_heads_are_refused() -> None:
    query, key = weights()
    with pytest.raises(ValueError, match="query must have 5 heads"):
        clip_qk_(query, key, torch.ones(5))
    with pytest.raises(ValueError, match="query must have 0 heads"):
        clip_qk_(query, key, torch.ones(0))
    with pytest.raises(ValueError, match=r"one number per head, got shape \(2, 4\)"):
        clip_qk_(query, key, torch.ones(2, 4))
    with pytest.raises(ValueError, match="the same weight"):
        clip_qk_(query, query, torch.ones(4))
    for wrong in ({"threshold": 0}, {"balance": -0.1}, {"balance": 1.1}):
        with pytest.raises(ValueError, match=r"positive and balance must be in \[0, 1\]"):
            clip_qk_(query, key, torch.ones(4), **wrong)


@pytest.mark.parametrize("largest", [float("inf"), float("nan")])
def test_heads_whose_logits_are_not_finite_stay(largest: float) -> None:
    query, key = weights()
    before = query.clone()
    assert clip_qk_(query, key, torch.tensor([largest, 1, 1, 1])).tolist() == [1, 1]
    assert torch.equal(query, before)
