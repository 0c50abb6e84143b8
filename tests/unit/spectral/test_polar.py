"""msign, compared with a float64 SVD."""

import pytest
import torch
from torch import Tensor

from spectral import msign
from spectral.polar import (
    CACHE_ELEMENTS,
    SCHEDULES,
    coefficients,
    normalized,
    normalized_,
    prefers_gram,
    restart_steps,
)
from tests.matrices import gaussian, msign_by_svd, scalar_map, spectrum

# Numbers of columns at which msign uses each form, by number of rows.
BY_FORM = pytest.mark.parametrize("ratio", [1.5, 4], ids=["plain", "gram"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 5, 8, 11])
@BY_FORM
def test_equals_the_polynomials_on_the_svd(schedule: str, steps: int, ratio: float) -> None:
    wide = int(12 * ratio)
    for shape in ((3, 12, wide), (2, 1, wide, 12), (1, 7), (7, 1), (1, 1), (16, 16)):
        x = gaussian(*shape)
        y = msign(x, schedule=schedule, steps=steps)
        # simple and quintic oscillate, which amplifies rounding; 1e-11 is far below any polynomial
        # error.
        torch.testing.assert_close(y, msign_by_svd(x, schedule, steps), rtol=0, atol=1e-11)


def test_schedules_that_converge_reach_one() -> None:
    """Compare the response of each schedule on [1e-2, 1], in which a wrong digit would show."""
    s = torch.logspace(-2, 0, 400, dtype=torch.float64)
    bounds = {"polar_express": 1e-4, "polar_express_upstream": 1e-3, "deepseek": 1e-3}
    for schedule, bound in bounds.items():
        length = len(SCHEDULES[schedule].coefficients)
        assert (scalar_map(s, schedule, length) - 1).abs().max() < bound, schedule
    assert scalar_map(torch.tensor(1e-9), "polar_express", 8) / 1e-9 == pytest.approx(
        6363, rel=1e-3
    )
    upstream = scalar_map(torch.tensor(1e-9), "polar_express_upstream", 8) / 1e-9
    assert upstream == pytest.approx(20775, rel=1e-3)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-4), (torch.float16, 0.15)])
@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
def test_gram_form_is_as_accurate_as_plain(dtype: torch.dtype, bound: float, decay: float) -> None:
    """Test flat, 1/k and 1/k^2 spectra. Without restarts, half precision diverges on the last two.

    `bound` is roughly the error of the plain form on 1/k^2, where even the rounding of the input is
    visible.
    """
    x = spectrum(torch.arange(1, 129, dtype=torch.float64) ** -decay, 128, 512)
    exact = msign_by_svd(x, "polar_express", 8, dtype)

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    polynomials = coefficients("polar_express", 8, dtype)
    assert prefers_gram(128, 512, polynomials, dtype)
    gram, plain = msign(x.float(), dtype=dtype), normalized(x.float()).to(dtype)
    for a, b, c in polynomials:
        square = plain @ plain.mT
        plain = a * plain + (b * square + c * square @ square) @ plain
    assert error(gram) < bound
    # In float32 the one restart leaves a few times the plain form's 1e-6, still negligible.
    assert error(gram) < 2 * error(plain) + 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_extremes_of_scale(scale: float) -> None:
    """The squares of these values would underflow or overflow."""
    x = gaussian(8, 24).float()
    torch.testing.assert_close(msign(x * scale), msign(x), rtol=0, atol=1e-5)


@BY_FORM
def test_zero_nan_and_null_directions(ratio: float) -> None:
    x = gaussian(3, 16, int(16 * ratio)).float()
    x[0] = 0
    x[1, 2, 3] = torch.nan
    x[2] = x[2, :, :1] * x[2, :1]  # rank one
    y = msign(x)
    assert (y[0] == 0).all()
    assert y[1].isnan().all()
    values = torch.linalg.svdvals(y[2].double())
    assert abs(values[0] - 1) < 1e-4
    # Rounding of a rank-one float32 matrix is 6e-8, times the slope 6363 at zero.
    assert values[1] < 1e-3


@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_matrices_are_normalised_in_place_to_the_same_bits(dtype, scale) -> None:
    x = scale * torch.randn(2, 520, 530, generator=torch.Generator().manual_seed(4), dtype=dtype)
    x[0, 3, 5] = torch.nan
    assert x[0].numel() > CACHE_ELEMENTS["cpu"]
    for matrices in (x, x.mT):
        result = normalized_(matrices.clone(), torch.bfloat16)
        assert result[0].isnan().all()
        reference = matrices[1].double() / torch.linalg.matrix_norm(matrices[1].double())
        torch.testing.assert_close(result[1], reference.bfloat16(), rtol=2**-7, atol=0)


def test_automatic_form_takes_fewer_flops() -> None:
    eight, half = coefficients("polar_express", 8), coefficients("polar_express", 8, torch.float16)
    assert prefers_gram(128, 2048, eight, torch.float32)
    assert prefers_gram(2048, 6144, half, torch.float16)
    assert not prefers_gram(2048, 6144, half, torch.bfloat16)
    assert not prefers_gram(1024, 1024, eight, torch.float32)
    assert restart_steps(half, torch.float16) == (2, 4)
    assert restart_steps(eight, torch.float32) == (3,)


@pytest.mark.parametrize(
    "argument", [{"schedule": "polar"}, {"steps": 0}, {"dtype": torch.int32}, {"dtype": "float16"}]
)
def test_errors_name_the_argument(argument: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(argument))} must be"):
        msign(torch.ones(2, 2), **argument)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        msign(torch.ones(3))


@pytest.mark.parametrize("shape", [(6, 6), (2, 5, 7), (3, 40, 9), (4, 24)])
def test_the_gradient_is_that_of_the_polar_factor(shape: tuple[int, ...]) -> None:
    """Test the plain and the Gram form, for wide, tall and stacked matrices."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    values = torch.linspace(0.5, 1, min(shape[-2:]), dtype=torch.float64)
    x = ((u * values) @ vh).requires_grad_()
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    (expected,) = torch.autograd.grad((u @ vh * weight).sum(), x)
    (gradient,) = torch.autograd.grad((msign(x, steps=14) * weight).sum(), x)
    # Fourteen steps have converged; the rest is float64 rounding.
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="out="):  # not a result that is never written
        normalized(x, out=torch.empty_like(x))
