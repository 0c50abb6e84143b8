"""Sequences are split across context ranks and reassembled in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.layout import context_chunks, context_part, in_sequence_order


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


def test_a_length_that_does_not_divide_is_refused() -> None:
    message = r"length must be divisible by 2 \* context-parallel size = 8, got 12"
    with pytest.raises(ValueError, match=message):
        context_part(torch.zeros(2, 12), 1, rank=0, size=4)
