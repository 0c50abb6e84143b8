"""Attention with capped scores on a CUDA device: 16-bit results compared with float64, and peak
memory."""

import pytest
import torch
from torch import Tensor

from models.blocks.attention import ROWS
from models.blocks.softcapped_attention import softcapped_attention


def outputs_and_gradients(inputs: list[Tensor], window: int | None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = softcapped_attention(*leaves, 0.2, 5.0, window)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
def test_sixteen_bits_are_near_float64(dtype: torch.dtype, window: int | None) -> None:
    shapes = [(3 * ROWS, 2, 8, 64), (3 * ROWS, 2, 4, 64), (3 * ROWS, 2, 4, 64)]
    inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    ours = outputs_and_gradients(inputs, window)
    exact = outputs_and_gradients([x.double() for x in inputs], window)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype
        # Weights and results are rounded to 8 or 11 bits, sums are float32.
        assert (a.double() - b).norm() < {torch.bfloat16: 1e-2, torch.float16: 2e-3}[
            dtype
        ] * b.norm()


def test_scores_of_a_long_sequence_never_exist() -> None:
    length, heads = 8192, 8
    inputs = [
        torch.randn(length, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    ]
    outputs_and_gradients(inputs, None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs_and_gradients(inputs, None)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 0.5 * 4 * heads * length**2
