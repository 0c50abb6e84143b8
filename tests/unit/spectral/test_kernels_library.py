"""Symmetric matmuls in the library. On a CPU, large matmuls are computed in blocks of rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spectral import kernels
from spectral.kernels import library
from tests.step_trace import Operations

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDE = (torch.float32, torch.float64)
LARGE = 513
"""Number of rows that is large enough for wide dtypes to use blocks, and is not a multiple of the
block size."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw matrices with spectral norms of about 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.div_(shape[-2] ** 0.5 + shape[-1] ** 0.5).to(dtype)


def symmetric(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = drawn(*shape, dtype=torch.float64)
    return ((x + x.mT) / 2).to(dtype)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "polynomial": lambda r: kernels.polynomial(r, -1.5, 0.5, 2.25),
    # Different matrices that commute, as polynomials of one matrix.
    "commuting": lambda r: kernels.commuting(
        kernels.polynomial(r, 0.5, -0.25, 1.0), kernels.polynomial(r, -0.5, 0.125, 2.0), 0.75
    ),
    "square": lambda r: kernels.commuting(r, r),
}


def assert_right(result: Tensor, exact: Tensor) -> None:
    """Check the errors. Entries are at most 3 and are rounded to the dtype three times, and float32
    sums of `n` terms have errors of about sqrt(n) roundings."""
    bound = (12 + result.shape[-1] ** 0.5) * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=bound)


def by_blocks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Compute matmuls with at least `rows` rows in blocks, for all dtypes."""
    monkeypatch.setattr(library, "LEAST_ROWS", dict.fromkeys(FLOATS, rows))


@pytest.mark.parametrize("slow", [torch.bfloat16, torch.float16])
def test_products_through_float32_are_rounded_once(slow, monkeypatch) -> None:
    """The test is valid on any CPU, because float64 represents every sum of 16-bit products
    exactly."""
    monkeypatch.setattr(library, "SLOW_ON_CPU", {slow})
    for dtype in (torch.bfloat16, torch.float16):
        a, b = drawn(3, 33, 40, dtype=dtype), drawn(3, 40, 33, dtype=dtype)
        c, r = symmetric(3, 33, 33, dtype=dtype), symmetric(3, 33, 33, dtype=dtype)
        exact, gram, square = (x.double() @ y.double() for x, y in ((a, b), (a, a.mT), (r, r)))
        with Operations() as operations:
            results = {
                library.product(a, b): exact,
                library.product(a[:1], b[:1]): exact[:1],
                kernels.gram(a): gram,
                library.product(a, b, c, beta=0.5, alpha=2.0): 0.5 * c.double() + 2 * exact,
                kernels.polynomial(r, 0.5, 2.0): 0.5 * r.double() + 2 * square,
            }
        multiplied = [kinds for name, kinds in operations.seen if "mm" in name]
        assert {kind for kinds in multiplied for _, kind, _ in kinds} == {
            torch.float32 if dtype == slow else dtype
        }
        # Half a unit in the last place, or two where the library rounds the sum once more.
        ulp = torch.finfo(dtype).eps
        rtol, atol = (0.501 * ulp, 1e-6) if dtype == slow else (ulp, ulp / 64)
        for found, expected in results.items():
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["gram", *PRODUCTS])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_products_are_right_and_exactly_symmetric(name: str, dtype: torch.dtype) -> None:
    call = PRODUCTS.get(name, kernels.gram)
    x = symmetric(1, LARGE, LARGE, dtype=dtype)[:, :, : 70 if name == "gram" else None]
    found = call(x)
    assert found.dtype == dtype and (dtype not in WIDE or torch.equal(found, found.mT))
    assert_right(found, call(x.double()))


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 5, 41, 150])
@pytest.mark.parametrize("name", ["gram", *PRODUCTS])
def test_blocks_agree_with_the_whole(name, n, batch, monkeypatch) -> None:
    """In float64, only the order of sums may differ."""
    call = PRODUCTS.get(name, kernels.gram)
    x = symmetric(batch, n, n, dtype=torch.float64)
    by_blocks(monkeypatch, n + 1)
    whole = call(x)
    by_blocks(monkeypatch, n)
    found = call(x)
    assert found.shape == (batch, n, n) and torch.equal(found, found.mT)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["gram", *PRODUCTS])
def test_nan_and_infinity_come_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a matrix with NaN or infinity in one row and column, blocks give the same NaN and
    infinities as the whole matmul."""
    call = PRODUCTS.get(name, kernels.gram)
    for bad in (float("nan"), float("inf")):
        x = symmetric(3, 20, 20)
        x[1, 13] = x[1, :, 13] = bad
        by_blocks(monkeypatch, 21)
        whole = call(x)
        by_blocks(monkeypatch, 20)
        assert torch.equal(call(x).isnan(), whole.isnan()) and whole[1].isnan().any()
        assert not whole[0].isnan().any()
