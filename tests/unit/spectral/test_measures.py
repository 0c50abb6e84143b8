"""The measures, compared with float64 SVDs, closed forms and sampled models."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from spectral import measures
from tests.matrices import gaussian, spectrum

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
        # float32 decompositions are accurate to a few units of 6e-8 times the figure's condition.
        np.testing.assert_allclose(measure(w.float()).numpy(), value, rtol=1e-4)


@pytest.mark.parametrize("measure", ZERO_FOR_ZERO)
def test_zero_and_nan_matrices(measure: object) -> None:
    w = torch.zeros(3, 5, 4)
    w[1] = torch.randn(5, 4)
    w[2, 0, 0] = math.nan
    values = measure(w)  # type: ignore[operator]
    assert values[0] == 0 and values[1].isfinite() and values[2].isnan()
    assert measure(w[:0]).shape == (0,)  # type: ignore[operator]


SPECTRA = {
    "Gaussian": lambda: gaussian(160, 200),
    "flat": lambda: spectrum(torch.ones(160, dtype=torch.float64), 160, 200),
    "close": lambda: spectrum(1 - 1e-5 * torch.arange(160, dtype=torch.float64), 160, 200),
    "decaying": lambda: spectrum(torch.logspace(0, -6, 160, dtype=torch.float64), 160, 200),
    "power": lambda: spectrum(torch.arange(1, 161, dtype=torch.float64) ** -2, 200, 160),
    "low rank": lambda: gaussian(160, 5) @ gaussian(5, 200, seed=1),
    "tail": lambda: spectrum(torch.tensor([1.0] + [1e-5] * 159, dtype=torch.float64), 160, 200),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_figures_by_products_are_those_of_a_decomposition(name: str) -> None:
    """The figures agree up to the errors given in their docstrings."""
    w = torch.stack([SPECTRA[name](), 1e-9 * SPECTRA[name]()])
    values = torch.linalg.svdvals(w)
    close = 1e-3 if name == "close" else 1e-6
    found = measures.stable_rank_of_gram(measures.gram(w))
    torch.testing.assert_close(found, measures.stable_rank_of(values), rtol=close, atol=0)
    found = measures.nuclear_norm(w.float()).double()
    torch.testing.assert_close(found, values.sum(-1), rtol=1e-5, atol=0)


def test_figures_by_products_of_zero_and_nan_matrices() -> None:
    w = torch.zeros(2, 80, 90)
    w[1, 0, 0] = math.nan
    for figure in (measures.stable_rank_of_gram(measures.gram(w)), measures.nuclear_norm(w)):
        assert figure[0] == 0 and figure[1].isnan()


def test_modified_condition_number() -> None:
    assert measures.modified_condition_number(torch.diag(torch.tensor([1.0, 0.0]))) == math.inf
    assert measures.modified_condition_number(torch.zeros(3, 3)).isnan()
    assert measures.modified_condition_number_of(torch.arange(11.0, 0, -1)) == 11 / 1.5


def test_global_condition_number_is_a_geometric_mean_of_the_usable() -> None:
    numbers = torch.tensor([[2.0, 8.0], [math.inf, math.nan]])
    assert float(measures.global_modified_condition_number(numbers)) == pytest.approx(4)
    assert measures.global_modified_condition_number(torch.tensor([math.inf])).isnan()


def noise(gradients: Tensor) -> measures.Noise:
    """Return the signal and the noise in `gradients` `[..., M, rows, cols]`."""
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
