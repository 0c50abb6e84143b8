"""16-bit msign stays bounded for any input, because of its form, margins and restarts."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectral.polar import SCHEDULES, coefficients, largest_value, msign

DTYPES = [torch.bfloat16, torch.float16]
STEPS = 8
ROOM = 1.1
"""Margin above the largest value of the polynomials on [0, 1]. Unstable forms reach 1e3 or NaN."""
SHAPES = [(24, 48), (32, 32), (32, 1024), (40, 64), (64, 128), (128, 128), (128, 352)]


def largest(x: Tensor) -> float:
    """Return the largest singular value in `x` `[batch, rows, cols]`, or NaN if any value is not
    finite."""
    return float(torch.linalg.matrix_norm(x.double(), 2).max())


def gradient_like(shape: tuple[int, int], count: int, generator: torch.Generator) -> Tensor:
    """Return matrices `dY^T X` `[count, rows, cols]`, computed from 16 to 512 tokens with
    outliers."""
    (rows, cols), drawn = shape, []
    for i in range(count):
        tokens = (16, 64, 256, 512)[i % 4]
        x, dy = (torch.randn(tokens, size, generator=generator) for size in (cols, rows))
        spread, loud = (torch.randn(size, generator=generator) for size in (cols, rows))
        x = (x + 2 * torch.randn(cols, generator=generator)) * (0.7 * spread).exp()
        dy = dy * torch.randn(tokens, 1, generator=generator).exp() * (0.7 * loud).exp()
        drawn.append(dy.mT @ x)
    return torch.stack(drawn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_momenta_that_made_a_bfloat16_gram_form_diverge(root, schedule, dtype) -> None:
    momenta = load_file(root / "tests/data/diverging_momenta.safetensors")["momentum"].float()
    bound = ROOM * max(1.0, largest_value(coefficients(schedule, STEPS, dtype)))
    assert largest(msign(momenta, schedule=schedule, steps=STEPS, dtype=dtype)) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_like_gradients(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = gradient_like(shape, 12, torch.Generator().manual_seed(0))
    bound = ROOM * max(1.0, largest_value(coefficients("polar_express", STEPS, dtype)))
    assert largest(msign(x, steps=STEPS, dtype=dtype)) <= bound
