"""Compare the kernels for small problems, in Triton's interpreter, with the library.

Started like tests/kernels/interpreted.py.
"""

import pytest
import torch

from spectral import singular_triplets, tangent_model
from spectral.kernels import small
from spectral.singular_triplets import SQUARINGS, TINY
from spectral.tangent_model import GRID, Model


def top_eigenvector(t: torch.Tensor) -> torch.Tensor:
    return small.top_eigenvector(t, SQUARINGS, TINY)


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (3, 2), (4, 16), (2, 20), (1, 33), (0, 4)])
def test_top_eigenvector(batch: int, size: int) -> None:
    """The result equals that of the library up to float64 rounding, and that of an eigensolver up
    to sign."""
    x = torch.randn(batch, size, 2 * size, dtype=torch.float64) * 1e-3
    t = x @ x.mT
    found = top_eigenvector(t)
    torch.testing.assert_close(found, singular_triplets._top_eigenvector(t), rtol=0, atol=1e-12)
    overlap = (found * torch.linalg.eigh(t).eigenvectors[..., -1]).sum(-1).abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap))


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's maximum in the interpreter uses it
def test_eigenvectors_of_zero_of_equal_values_and_of_nan() -> None:
    nan = torch.full((3, 3), torch.nan)
    t = torch.stack([torch.zeros(3, 3), torch.eye(3), nan]).double()
    found = top_eigenvector(t)
    assert not found[0].any()
    assert found[1].tolist() == [1, 0, 0]
    assert found[2].isnan().all()


def test_an_eigenvector_of_equal_entries() -> None:
    """The eigenvalue is 33 times the largest entry, and the square of its 128th power would
    overflow float64."""
    t = torch.full((1, 33, 33), 1 / 33, dtype=torch.float64)
    found = top_eigenvector(t)
    torch.testing.assert_close(found, torch.full_like(found, 33**-0.5))


def test_eigenvectors_of_a_transposed_view() -> None:
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    t = (x @ x.mT).repeat(1, 2, 2)[:, ::2, ::2]
    torch.testing.assert_close(top_eigenvector(t), top_eigenvector(t.contiguous()))


def models(batch: int, nodes: int) -> Model:
    """Draw models in which `f` increases, because residues, shifts and blocks are positive."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, nodes, 2, 5, dtype=torch.float64, generator=generator)
    pair = x @ x.mT
    block = torch.stack((pair[..., 0, 0], pair[..., 0, 1], pair[..., 1, 1]))
    weight = torch.rand(batch, nodes, dtype=torch.float64, generator=generator)
    half = 4 * torch.rand(batch, dtype=torch.float64, generator=generator)
    return Model(block, weight, torch.zeros_like(half), half, torch.ones_like(half))


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 7), (5, 48), (0, 4)])
def test_root(batch: int, nodes: int) -> None:
    model = models(batch, nodes)
    found = small.root(model.block, model.weight, model.half, *GRID)
    torch.testing.assert_close(found, tangent_model.root(model), rtol=1e-9, atol=1e-12)


def test_roots_at_the_ends_of_a_bracket_without_one_and_of_nan(monkeypatch) -> None:
    """Test a bracket of zero width, `f` entirely above and below 0, and NaN.

    If `f` does not increase, the result depends on the grid, so the library uses the kernel's grid
    here.
    """
    monkeypatch.setattr(tangent_model, "CPU_GRID", GRID)
    model = models(4, 3)
    model.half[0] = 0
    model.block[1, 1], model.block[1, 2] = 100.0, -100.0
    model.weight[3, 1] = torch.nan
    found = small.root(model.block, model.weight, model.half, *GRID)
    library = tangent_model.root(model)
    torch.testing.assert_close(found, library, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert found[0][3].isnan()


@pytest.mark.parametrize(
    ("batch", "count", "n"), [(1, 1, 1), (2, 2, 70), (3, 10, 130), (2, 14, 64), (1, 20, 33)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal_vectors(batch: int, count: int, n: int, dtype: torch.dtype) -> None:
    """The result equals that of the library up to float64 rounding, amplified by nearly parallel
    rows. In float32, the rows are the columns of a matrix."""
    x = torch.randn(batch, count, n, dtype=torch.float64)
    x[:, 1:] = x[:, :1] + 0.1 * x[:, 1:]
    x = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).to(dtype)
    x = x.mT.contiguous().mT if dtype == torch.float32 else x
    dependent = singular_triplets.DEPENDENT[dtype]
    found = small.orthonormal(x, dependent)
    assert found.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        found, singular_triplets.orthonormal(x, dependent), rtol=0, atol=bound
    )


def test_dependent_and_zero_vectors_become_zero() -> None:
    x = torch.eye(5, 8, dtype=torch.float64)[None].repeat(2, 1, 1).mT.contiguous().mT
    x[0, 2], x[0, 3], x[1, 0] = x[0, 0], 0, 0
    found = small.orthonormal(x, singular_triplets.DEPENDENT[torch.float64])
    torch.testing.assert_close(
        found, singular_triplets.orthonormal(x, singular_triplets.DEPENDENT[torch.float64])
    )
    assert not found[0, 2:4].any() and not found[1, 0].any()
    assert found[0, 4].norm() == pytest.approx(1)
    assert small.orthonormal(x[:0], 1e-13).shape == (0, 5, 8)
