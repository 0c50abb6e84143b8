"""Sequences cut over context ranks and put back in order, and exact attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from models.blocks.attention import SDPACoreAttention, causal_attention
from models.context import context_chunks, context_part, in_sequence_order


@given(size=st.integers(1, 6), step=st.integers(1, 5))
def test_the_parts_together_are_the_sequence(size: int, step: int) -> None:
    whole = torch.arange(3 * 2 * size * step).view(3, -1)
    parts = []
    for rank in range(size):
        part = context_part(whole, 1, rank=rank, size=size)
        chunks = context_chunks(whole.shape[1], rank=rank, size=size)
        assert part[0].tolist() == [i for chunk in chunks for i in chunk]
        parts.append(part.T)
    if size > 1:
        assert torch.equal(in_sequence_order(torch.cat(parts), size), whole.T)


def test_four_chunks_over_two_ranks() -> None:
    whole = torch.arange(8)
    assert context_part(whole, 0, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert context_part(whole, 0, rank=1, size=2).tolist() == [2, 3, 4, 5]


def test_every_rank_has_the_same_number_of_scores() -> None:
    length, size = 24, 3
    scores = [
        sum(
            position + 1
            for chunk in context_chunks(length, rank=rank, size=size)
            for position in chunk
        )
        for rank in range(size)
    ]
    assert scores == [length * (length + 1) // 2 // size] * size


def test_a_length_that_does_not_divide_is_refused() -> None:
    message = r"length must be divisible by 2 \* context parallel size = 8, got 12"
    with pytest.raises(ValueError, match=message):
        context_part(torch.zeros(2, 12), 1, rank=0, size=4)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_attention_of_the_last_positions(groups: int, queries: int) -> None:
    """Against softmax with a written-out mask, float64."""
    q = torch.randn(9, 2, 4, 6, dtype=torch.float64)
    k = torch.randn(9, 2, groups, 6, dtype=torch.float64)
    v = torch.randn(9, 2, groups, 5, dtype=torch.float64)
    wide_k, wide_v = (x.repeat_interleave(4 // groups, 2) for x in (k, v))
    scores = 0.3 * torch.einsum("sbhd,tbhd->bhst", q, wide_k)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), wide_v).flatten(2)
    ours = causal_attention(q[-queries:], k, v, 0.3)
    torch.testing.assert_close(ours, expected[-queries:], rtol=1e-12, atol=1e-12)


def attention(context: int = 1, **arguments: object) -> SDPACoreAttention:
    """The module for 4 heads of 8."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, context_parallel_size=context
    )
    plain = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return SDPACoreAttention(config, 1, **{**plain, **arguments})


def test_attention_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="causal self-attention, got 'cross'"):
        attention(attention_type="cross")
    with pytest.raises(ValueError, match="context parallelism must have 2 ranks, got none"):
        attention(context=2)
    x = torch.zeros(3, 1, 4, 8)
    with pytest.raises(ValueError, match="neither packed sequences nor an attention bias"):
        attention()(x, x, x, None, packed_seq_params=object())
    with pytest.raises(ValueError, match="neither packed sequences nor an attention bias"):
        attention()(x, x, x, None, attention_bias=torch.zeros(3, 3))
