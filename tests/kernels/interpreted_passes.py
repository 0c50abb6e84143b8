"""Compare kernels that join passes with their references in Triton's interpreter.

Started like tests/kernels/interpreted.py.
"""

import pytest
import torch
from torch import Tensor

from spectral.kernels import grouped, library
from spectral.kernels.dispatch import Tile

TILE = Tile(block=16, depth=16, warps=4, stages=2)
# Rounding of the result relative to its largest entry, as in interpreted.py.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}


def assert_close(value: Tensor, expected: Tensor, bound: float | None = None) -> None:
    """`value` equals `expected`, float64, but for one rounding to its dtype."""
    assert value.shape == expected.shape
    if expected.numel():
        error = (value.double() - expected).abs().max()
        assert error <= (bound or BOUNDS[value.dtype]) * expected.abs().max(), float(error)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "sizes",
    [[(2, 5)], [(1, 33), (2, 16)], [(1, 3), (0, 9), (2, 20), (1, 0), (1, 17)]],
    ids=["one stack", "two", "more than a launch takes, one empty, one without columns"],
)
def test_several_stacks_in_one_launch(sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    stacks = [torch.randn(batch, 18, cols).to(dtype) for batch, cols in sizes]
    stacks[-1] = stacks[-1].mT.contiguous().mT
    result = grouped.grams(stacks, TILE)
    assert_close(result, library.grams([x.double() for x in stacks]))
    assert torch.equal(result, result.mT)


def test_nan_stays_in_its_matrix_of_its_stack() -> None:
    stacks = [torch.randn(2, 17, 4), torch.randn(1, 17, 20)]
    stacks[0][1, 16, 2] = float("nan")
    result = grouped.grams(stacks, TILE)
    assert torch.equal(result.isnan(), library.grams(stacks).isnan())
    assert result[1, 16].isnan().all() and not result[[0, 2]].isnan().any()


def test_stacks_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="agree in rows, dtype and device"):
        grouped.grams([torch.ones(1, 4, 5), torch.ones(1, 3, 5)], TILE)
