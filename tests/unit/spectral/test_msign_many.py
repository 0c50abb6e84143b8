"""msign of matrices of different shapes, beside msign of each."""

import pytest
import torch
from torch import Tensor

from spectral import msign
from spectral.kernels import library
from spectral.msign_many import msign_many

SHAPES = [(8, 40), (2, 8, 16), (64, 8), (8, 8), (3, 12, 30), (0, 8, 20), (1, 5)]


def drawn(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_msign_of_each(dtype: torch.dtype) -> None:
    matrices = drawn(dtype)
    kept = [x.clone() for x in matrices]
    for x, y, before in zip(matrices, msign_many(matrices, steps=5), kept, strict=True):
        assert y.shape == x.shape and y.dtype == dtype and torch.equal(x, before)
        # Rounding of a few products; in float32 amplified by the smallest singular values.
        bound = 1e-11 if dtype == torch.float64 else 2e-3
        torch.testing.assert_close(y, msign(x, steps=5), rtol=0, atol=bound)


def test_work_on_equal_sides_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`X X^T` is iterated on once for all matrices whose shorter side is 8, squares apart."""
    sizes: list[tuple[int, int]] = []
    each = library.polynomial

    def counted(r: Tensor, *coefficients: float) -> Tensor:
        sizes.append((r.shape[0], r.shape[1]))
        return each(r, *coefficients)

    monkeypatch.setattr(library, "polynomial", counted)
    msign_many(drawn(torch.float32), steps=3)
    # 8 x 40, twice 8 x 16 and 64 x 8; the square by itself; three of 12 x 30; 1 x 5.
    assert set(sizes) == {(4, 8), (1, 8), (3, 12), (1, 1)}


def test_nan_and_dtypes_stay_apart() -> None:
    matrices = [torch.randn(8, 40), torch.randn(8, 20).double(), torch.randn(8, 30)]
    matrices[2][0, 0] = float("nan")
    results = msign_many(matrices)
    assert [y.dtype for y in results] == [torch.float32, torch.float64, torch.float32]
    assert [bool(y.isnan().any()) for y in results] == [False, False, True]
    assert results[2].isnan().all()


def test_no_matrices_and_vectors() -> None:
    assert msign_many([]) == []
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        msign_many([torch.ones(3)])
