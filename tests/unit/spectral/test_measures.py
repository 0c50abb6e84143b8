"""The measures against float64 SVD, closed forms and sampled models."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from spectral import measures

SHAPES = [(9, 6), (6, 9), (1, 7), (2, 3, 8, 5), (40, 31)]
ZERO_FOR_ZERO = [
    measures.spectral_norm,
    measures.stable_rank,
    measures.nuclear_rank,
    measures.effective_rank,
    measures.correlation,
]


@pytest.mark.parametrize("shape", SHAPES)
def test_measures_are_their_formulas_on_numpy_singular_values(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, dtype=torch.float64)
    s = np.linalg.svd(w.numpy(), compute_uv=False)
    share = s / s.sum(-1, keepdims=True)
    smallest = s[..., -math.ceil(0.1 * s.shape[-1]) :]
    expected = {
        measures.spectral_norm: s[..., 0],
        measures.stable_rank: (s**2).sum(-1) / s[..., 0] ** 2,
        measures.nuclear_rank: s.sum(-1) ** 2 / (s**2).sum(-1),
        measures.effective_rank: np.exp(-(share * np.log(share)).sum(-1)),
        measures.modified_condition_number: s[..., 0] / smallest.mean(-1),
    }
    for measure, value in expected.items():
        np.testing.assert_allclose(measure(w).numpy(), value, rtol=1e-10)
        # float32 decompositions are good to a few units of 6e-8 times the condition of the figure.
        np.testing.assert_allclose(measure(w.float()).numpy(), value, rtol=1e-4)


@pytest.mark.parametrize("measure", ZERO_FOR_ZERO)
def test_zero_and_nan_matrices(measure: object) -> None:
    w = torch.zeros(3, 5, 4)
    w[1] = torch.randn(5, 4)
    w[2, 0, 0] = math.nan
    values = measure(w)  # type: ignore[operator]
    assert values[0] == 0 and values[1].isfinite() and values[2].isnan()
    assert measure(w[:0]).shape == (0,)  # type: ignore[operator]


def test_modified_condition_number() -> None:
    assert measures.modified_condition_number(torch.diag(torch.tensor([1.0, 0.0]))) == math.inf
    assert measures.modified_condition_number(torch.zeros(3, 3)).isnan()
    assert measures.modified_condition_number_of(torch.arange(11.0, 0, -1)) == 11 / 1.5


def test_global_condition_number_is_a_geometric_mean_of_the_usable() -> None:
    numbers = torch.tensor([[2.0, 8.0], [math.inf, math.nan]])
    assert float(measures.global_modified_condition_number(numbers)) == pytest.approx(4)
    assert measures.global_modified_condition_number(torch.tensor([math.inf])).isnan()


def noise(gradients: Tensor) -> measures.Noise:
    """Signal and noise of `gradients` `[..., M, rows, cols]`."""
    flat = gradients.flatten(-2)
    return measures.noise_of(flat @ flat.mT)


def test_noise_is_that_of_numpy() -> None:
    g = torch.randn(2, 5, 3, 4, dtype=torch.float64) + 0.5
    got = noise(g)
    for i in range(2):
        flat = g[i].flatten(1).numpy()
        covariance = np.cov(flat, rowvar=False)
        total = np.trace(covariance)
        signal = max(0.0, (flat.mean(0) ** 2).sum() - total / 5)
        assert float(got.snr[i]) == pytest.approx(signal / total)
        assert float(got.signal_share[i]) == pytest.approx(signal / (signal + total))
        top = np.linalg.eigvalsh(covariance)[-1] / total
        assert float(got.top_share[i]) == pytest.approx(top)


def test_noise_of_degenerate_samples() -> None:
    same = torch.ones(3, 2, 2)
    got = noise(torch.stack([same, 0 * same, same * torch.nan]))
    assert got.snr[0] == math.inf and got.top_share[0] == 0 and got.signal_share[0] == 1
    assert got.snr[1] == 0 and got.signal_share[1] == 0
    assert got.snr[2].isnan() and got.top_share[2].isnan()
    with pytest.raises(ValueError, match="M >= 2"):
        measures.noise_of(torch.ones(1, 1))


def test_correlation_recovers_rho_of_its_model() -> None:
    # With Z^2 = 1 the estimate is exact up to 1 / sqrt(m n) = 1 / 256.
    for rho in (0.0, 0.05, 0.5):
        noise = torch.randn(256, 256, dtype=torch.float64)
        w = 0.3 * (math.sqrt(rho) + math.sqrt(1 - rho) * (noise - noise.mean()))
        assert float(measures.correlation(w)) == pytest.approx(rho, abs=0.01)
    assert float(measures.correlation(torch.ones(4, 6))) == pytest.approx(1)
    # Alternating signs: mean 0, rho = -1 / (m n - 1), the smallest possible.
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert float(measures.correlation(signs)) == pytest.approx(-1 / 3)
    assert measures.correlation(torch.ones(1, 1)) == 0
