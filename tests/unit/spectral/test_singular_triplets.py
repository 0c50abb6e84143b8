"""top_singular, compared with a float64 SVD: the iteration, and on CPUs the eigensolver for few
rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from spectral import singular_triplets, top_singular
from spectral.singular_triplets import (
    COLD_STEPS,
    NEARBY,
    _generic,
    _top_eigenvector,
    cold_start,
    top_pairs,
)
from tests.step_trace import Operations


@pytest.fixture(autouse=True, params=["iterated", "exact"])
def exact_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = {"iterated": 0, "exact": singular_triplets.EXACT_ROWS}
    monkeypatch.setattr(singular_triplets, "EXACT_ROWS", rows[request.param])
    yield


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def errors(w: Tensor, found: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """Return the largest relative error of sigma, and the smallest <u v^T, u1 v1^T>, in the
    batch."""
    sigma, u, v = (x.double() for x in found)
    left, values, right = torch.linalg.svd(w.double(), full_matrices=False)
    overlap = (u * left[..., 0]).sum(-1) * (v * right[..., 0, :]).sum(-1)
    return float((sigma / values[:, 0] - 1).abs().max()), float(overlap.min())


@pytest.mark.parametrize(
    "shape", [(128, 128), (64, 512), (512, 64), (512, 512), (1, 1), (1, 9), (9, 1), (2, 2), (3, 50)]
)
@pytest.mark.parametrize("scale", [1e-36, 1.0, 1e35])
def test_cold_start_on_gaussian_weights(shape: tuple[int, int], scale: float) -> None:
    """Gaussian weights, whose gaps are about 1% or less, are the hardest case. After a hundred
    power iterations from a cold start, errors reach 3e-3 and vectors are nearly orthogonal to the
    true vectors. The block Krylov start is accurate up to rounding. The squares of the extreme
    scales are out of range for float32."""
    w = gaussian(3, *shape) * scale
    relative, overlap = errors(w, cold_start(w))
    assert relative < 2e-6  # a few units of float32 rounding
    assert overlap > 0.9999


@pytest.mark.parametrize(
    ("rows", "cols", "rivals", "sigma_bound", "overlap_bound"),
    [(128, 128, 4, 2e-6, 0.999), (96, 256, 12, 1e-4, 0.999)],
)
def test_nearby_vectors_keep_the_top_pair_when_another_overtakes_it(
    rows: int, cols: int, rivals: int, sigma_bound: float, overlap_bound: float
) -> None:
    """Several singular values within 4% of each other, with fixed directions, take turns as the
    largest value. An iteration that starts only from the top vector, which is an exact singular
    vector, finds the next vector too late. If there are more such rivals than cached vectors, a
    rival may be found one step late."""
    steps = 300
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, rows, generator=generator, dtype=torch.float64)).Q
        for n in (rows, cols)
    )
    rate, phase = torch.rand(2, rivals, generator=generator, dtype=torch.float64)
    time = torch.arange(steps)[:, None]
    values = torch.cat((torch.ones(rivals), torch.linspace(0.9, 0.1, rows - rivals)))
    values = values.double().repeat(steps, 1)
    values[:, :rivals] += 0.02 * torch.sin((0.02 + 0.05 * rate) * time + 6.28 * phase)

    def worst(krylov_steps: int, nearby: Tensor | None) -> tuple[float, float]:
        """Return the largest error of sigma, and the smallest overlap in steps in which the top
        value is separated by 0.1%."""
        sigma_error, overlap = 0.0, 1.0
        cached = torch.zeros(1, rows)
        for now in values:
            w = ((left * now) @ right.mT).float()[None]
            size = krylov_steps if cached.any() else COLD_STEPS
            found = top_pairs([w], cached, steps=size, nearby=nearby)
            cached, nearby = found.short, found.nearby
            (first, second), (index, _) = now.topk(2)
            sigma_error = max(sigma_error, float((found.sigma / first - 1).abs()))
            if second < 0.999 * first:
                overlap = min(overlap, float((cached[0] @ left[:, index].float()).abs()))
        return sigma_error, overlap

    sigma_error, overlap = worst(4, torch.zeros(1, NEARBY, rows))
    assert sigma_error < sigma_bound
    assert overlap > overlap_bound
    sigma_error, overlap = worst(10, None)  # more passes, but from one vector
    assert sigma_error > 1e-3
    assert overlap < 0.5


@pytest.mark.parametrize("diagonal", [0.5, 1e-9])
@pytest.mark.parametrize("size", [2, 20, 96, 192, 400])
def test_the_top_eigenvector_may_have_equal_entries(size: int, diagonal: float) -> None:
    """In this case, the eigenvalue is up to `size` times the largest entry. Its 128th power, which
    is squared to compute the norm, must not overflow."""
    t = torch.full((1, size, size), 1 / size, dtype=torch.float64)
    t.diagonal(dim1=1, dim2=2).add_(diagonal)
    found = _top_eigenvector(t)
    torch.testing.assert_close(found, torch.full_like(found, size**-0.5))


def test_nearby_vectors_of_small_zero_and_unsound_matrices() -> None:
    for rows, cols in ((1, 1), (2, 3), (5, 40)):
        w = gaussian(2, rows, cols)
        w[1] = 0
        found = top_pairs([w], torch.zeros(2, rows), steps=4, nearby=torch.zeros(2, NEARBY, rows))
        expected = torch.linalg.matrix_norm(w.double(), 2).float()
        torch.testing.assert_close(found.sigma, expected)
        assert found.nearby is not None and found.nearby.isfinite().all()
        assert not found.nearby[1].any()
    for rows, dtype in ((3, torch.float32), (64, torch.float32), (2, torch.float64)):
        w = torch.ones(1, rows, 2 * rows, dtype=dtype)
        nearby = w.new_zeros(1, NEARBY, rows)
        for _ in range(3):  # of rank 1: nothing is left after the top vector
            _, _, _, nearby = top_pairs([w], nearby[:, 0], steps=4, nearby=nearby)
            assert nearby is not None and nearby.isfinite().all()
    broken = torch.full((1, NEARBY, 5), float("nan"))
    again = top_pairs([gaussian(1, 5, 40)], torch.zeros(1, 5), steps=4, nearby=broken)
    assert again.sigma.isfinite().all() and again.nearby.isfinite().all()


def test_zero_row_sums_are_not_fatal() -> None:
    """A constant start vector would be in the null space of these matrices, and retraction would
    explode."""
    w = torch.tensor([[[1.0, -1.0], [2.0, -2.0]]])
    assert cold_start(w)[0].item() == pytest.approx(10**0.5, rel=1e-6)
    w = gaussian(2, 48, 48)
    w = w - w.mean(-1, keepdim=True)
    assert errors(w, cold_start(w))[0] < 1e-5


def test_finds_a_spike_orthogonal_to_the_remembered_vector() -> None:
    """Starting from an exact singular vector of an old direction, a single call finds a new
    direction with a larger singular value."""
    w = torch.zeros(1, 40, 60)
    w[0, 0, 0], w[0, 1, 1] = 1.0, 1.5
    u, v = torch.zeros(1, 40), torch.zeros(1, 60)
    u[0, 0] = v[0, 0] = 1.0
    sigma, u, v = top_singular(w, u, v, steps=4)
    assert sigma.item() == pytest.approx(1.5, rel=1e-5)
    assert abs(float(u[0, 1] * v[0, 1])) == pytest.approx(1, abs=1e-5)


def test_zero_and_equal_singular_values() -> None:
    sigma, u, v = cold_start(torch.zeros(2, 5, 8))
    assert not sigma.any() and not u.any() and not v.any()
    sigma, u, v = cold_start(torch.eye(16)[None])
    assert sigma.item() == pytest.approx(1, abs=1e-6)
    assert float((u * v).sum()) == pytest.approx(1, abs=1e-5)


def test_float64_and_half_precision() -> None:
    w = gaussian(2, 64, 64).double()
    assert errors(w, cold_start(w))[0] < 1e-12
    half = w.bfloat16()
    sigma, u, _ = cold_start(half)
    assert sigma.dtype == u.dtype == torch.bfloat16
    # The result is rounded to bfloat16 (2^-9), the computation is not.
    assert errors(half, (sigma, u, u))[0] < 4e-3


def test_rejects_bad_input() -> None:
    w, u, v = gaussian(2, 6, 9), torch.zeros(2, 6), torch.zeros(2, 9)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        top_singular(w, u, v, steps=0)
    with pytest.raises(ValueError, match="w, u, v must have shapes"):
        top_singular(w, v, u)


def test_what_all_streams_read_is_copied_to_the_device_and_not_computed_there() -> None:
    """The host waits for a copy from pageable memory, but not for a kernel on one stream."""
    _generic.cache_clear()
    with Operations() as operations:
        _generic(2, 7, torch.float32, torch.device("meta"))
    on_meta = [name for name, kinds in operations.seen if any(d == "meta" for *_, d in kinds)]
    assert on_meta == ["aten._to_copy.default"]
