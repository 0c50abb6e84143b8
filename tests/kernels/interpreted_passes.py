"""Compare kernels that join passes with their references in Triton's interpreter: several stacks in
one launch, and the update in the last product's epilogue.

Started like tests/kernels/interpreted.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spectral.kernels import finish, grouped, library, update
from spectral.kernels.dispatch import Tile

TILE = Tile(block=16, depth=16, warps=4, stages=2)
# Rounding of the result relative to its largest entry, as in interpreted.py.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
VIEWS = [lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x.repeat(1, 2, 2)[:, ::2, ::2]]


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


@pytest.mark.parametrize(
    ("shape", "dtype", "view"),
    [
        ((2, 17, 33), torch.float32, VIEWS[0]),
        ((1, 33, 17), torch.bfloat16, VIEWS[1]),
        ((1, 16, 16), torch.float16, VIEWS[2]),
        ((1, 1, 1), torch.float32, VIEWS[0]),
        ((0, 4, 5), torch.float32, VIEWS[0]),
    ],
    ids=["wide", "tall, transposed", "one tile, strided", "one", "none"],
)
def test_update_in_the_epilogue(
    shape: tuple[int, int, int], dtype: torch.dtype, view: Callable[[Tensor], Tensor]
) -> None:
    """Wide and tall weights, a 16-bit copy, rates per matrix; an inactive step moves nothing."""
    batch, rows, cols = shape
    small, large = sorted((rows, cols))
    p = torch.randn(batch, small, small).to(dtype)
    y = view(torch.randn(batch, small, large).to(dtype))
    weight, copy = view(torch.randn(shape)), torch.randn(shape).bfloat16()
    direction = 0.5 * y.double() + p.double() @ y.double()
    direction = direction if rows <= cols else direction.mT
    # Powers of two, so that products with them are exact.
    factor, step = torch.tensor([0.75, 0.5])[:batch], torch.tensor([0.125, 0.25])[:batch]
    yes, no = torch.tensor(True), torch.tensor(False)
    expected = factor[:, None, None] * weight.double() - step[:, None, None] * direction
    kept = weight.clone(), copy.clone()
    bad = torch.full_like(p, float("nan"))
    square = finish.finish_(weight, bad, 0.5, y, factor, step, no, copy, TILE)
    assert torch.equal(weight, kept[0]) and torch.equal(copy, kept[1]) and square.isnan().all()
    square = finish.finish_(weight, p, 0.5, y, factor, step, yes, copy, TILE)
    # Sums of up to 17 products in another order; the direction is not rounded to `dtype`.
    assert_close(weight, expected, 2e-6)
    assert_close(square, direction.square().sum((1, 2)), 1e-5)
    assert_close(copy, weight.double(), 2**-7)
    alone = kept[0].clone()
    finish.finish_(alone, p, 0.5, y, factor, step, yes, None, TILE)
    assert torch.equal(alone, weight)
    # The last unit is refused, the others take their step.
    some, gate = kept[0].clone(), torch.arange(batch) < batch - 1
    finish.finish_(some, p, 0.5, y, factor, step, gate, None, TILE)
    assert torch.equal(some, torch.where(gate[:, None, None], weight, kept[0]))


def test_nan_in_the_epilogue_stays_in_its_matrix() -> None:
    weight, p, y = torch.randn(2, 4, 20), torch.randn(2, 4, 4), torch.randn(2, 4, 20)
    y[1, 2, 19] = float("nan")
    one = torch.ones(2)
    norm = finish.finish_(weight, p, 0.0, y, one, one, torch.tensor(True), None, TILE)
    assert norm.isnan().tolist() == [False, True]
    assert weight[1, :, 19].isnan().all() and not weight[0].isnan().any()
    assert not weight[1, :, :19].isnan().any()


def test_what_the_epilogue_does_not_take() -> None:
    p, y, one = torch.ones(1, 4, 4), torch.ones(1, 4, 5), torch.ones(1)
    for weight, message in ((y.double(), "must be float32"), (torch.ones(1, 3, 5), "must be \\[b")):
        with pytest.raises(ValueError, match=message):
            finish.finish_(weight, p, 0.0, y, one, one, torch.tensor(True), None, TILE)
    with pytest.raises(ValueError, match=r"step must be float32 \[1\], got torch.float32 \[\]"):
        finish.finish_(y, p, 0.0, y, one, one[0], torch.tensor(True), None, TILE)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_update_writes_the_copy(dtype: torch.dtype) -> None:
    weight, direction = torch.randn(2, 70, 90), torch.randn(2, 70, 90)
    copy = torch.randn(2, 90, 70).to(dtype).mT
    factor, step = torch.full((2,), 0.75), torch.full((2,), 0.125)
    yes, no = torch.tensor(True), torch.tensor(False)
    kept = copy.clone()
    update.update_(weight, direction, factor, step, no, copy)
    assert torch.equal(copy, kept)
    update.update_(weight, direction, factor, step, yes, copy)
    assert_close(copy, weight.double(), 2**-7 if dtype == torch.bfloat16 else None)
