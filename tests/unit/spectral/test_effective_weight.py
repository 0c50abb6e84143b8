"""Weight preconditioning, compared with float64 SVDs, autograd and the figures in the PC Layer
paper."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spectral import effective_weight
from spectral.effective_weight import EffectiveWeightGradient, Preconditioner
from spectral.odd_polynomial import PRESETS, Level, evaluate, fit_polynomial, stages

SHAPES = [(96, 64), (64, 96), (64, 64), (1, 16), (16, 1), (3, 24, 40), (2, 2, 40, 24), (0, 8, 4)]
CUTOFFS = {1: 0.8, 2: 0.6, 3: 0.4, 4: 0.3}


def precondition(
    w: Tensor, u: Tensor, v: Tensor, gamma: Tensor | float, level: Level, **options: Any
) -> Tensor:
    """Return PC(W)."""
    return Preconditioner(level=level, **options).effective(w, u, v, gamma)


def vjp(grad: Tensor, *arguments: Any, level: Level, **options: Any) -> EffectiveWeightGradient:
    """Return the gradients with respect to W and gamma, where `arguments` are W, u, v and gamma."""
    return Preconditioner(level=level, **options).vjp(grad, *arguments)


def matrix(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return a Gaussian matrix and its exact top singular pair."""
    w = torch.randn(*shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(w, full_matrices=False)
    return w.to(dtype), left[..., :, 0].to(dtype), right[..., 0, :].to(dtype)


def reference(w: Tensor, level: int | tuple[float, ...]) -> Tensor:
    """Compute PC(W) with a float64 SVD, for gamma = 1."""
    left, sigma, right = torch.linalg.svd(w.double(), full_matrices=False)
    top = sigma[..., :1]
    return (left * (top * evaluate(sigma / top, level))[..., None, :]) @ right


def in_graph(w: Tensor, u: Tensor, v: Tensor, gamma: Tensor, level: Level, recover: bool) -> Tensor:
    """Compute PC(W) by its definition, with differentiable operations, for autograd."""
    s = torch.einsum("...i,...ij,...j->...", u, w, v)[..., None, None] + 1e-7
    x = w / s
    for coefficients in stages(level):
        y, odd = torch.zeros_like(x), x
        for c in coefficients:
            y, odd = y + c * odd, odd @ x.mT @ x
        x = y
    return gamma[..., None, None] * (s.detach() if recover else 1.0) * x


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest spectral norm of a - b, relative to the norm of b."""
    if b.numel() == 0:
        return 0.0
    error = torch.linalg.matrix_norm(a.double() - b.double(), 2)
    return float((error / torch.linalg.matrix_norm(b.double(), 2)).max())


@pytest.mark.parametrize("level", PRESETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_horner_is_the_map_of_the_singular_values(shape: tuple[int, ...], level: int) -> None:
    # epsilon = 0, to compare only the polynomial. Rounding of k + 1 products, see the paper.
    w, u, v = matrix(*shape)
    out = precondition(w, u, v, 1.0, level, epsilon=0.0)
    assert relative(out, reference(w, level)) < 1.2e-14 * max(1, level)
    single = precondition(w.float(), u.float(), v.float(), 1.0, level, epsilon=0.0)
    assert single.dtype == torch.float32
    assert relative(single, reference(w.float(), level)) < 3e-6


@pytest.mark.parametrize("options", [{}, {"norm_recovery": False}, {"spectral_norm": "none"}])
@pytest.mark.parametrize("level", [*PRESETS, (0.5, 0.25), "over_flattening"])
def test_the_fast_form_equals_the_reference(level: Level, options: dict[str, Any]) -> None:
    """Test tall and wide float64 matrices with norms of about 1, for which every map is defined."""
    pc = Preconditioner(level=level, **options)
    for shape in [(24, 40), (40, 24), (24, 24)]:
        w, u, v = matrix(*shape)
        w = w / torch.linalg.matrix_norm(w, ord=2)
        expected = effective_weight.reference(pc, w, 0.7)
        torch.testing.assert_close(pc.effective(w, u, v, 0.7), expected, rtol=0, atol=1e-10)


def test_half_precision_is_computed_in_float32() -> None:
    w, u, v = matrix(128, 128, dtype=torch.bfloat16)
    out = precondition(w, u, v, 1.0, 4)
    assert out.dtype == torch.bfloat16
    # Rounding the result to bfloat16 costs 2^-9 per entry; a bfloat16 polynomial is wrong by 3e-2.
    sigma = torch.einsum("i,ij,j", u.double(), w.double(), v.double())
    left, values, right = torch.linalg.svd(w.double())
    exact = (left * (sigma * evaluate(values / sigma, 4))) @ right
    assert relative(out, exact) < 3e-3


def test_published_figures() -> None:
    x = torch.tensor([0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 0.9, 1, 1.08, 1.1], dtype=torch.float64)
    level4 = [0.0362, 0.1801, 0.3534, 0.6553, 0.8695, 1.0202, 0.9948, 1.0042, 1, 0.9993, 1.0078]
    level2 = {0.01: 0.0208, 0.1: 0.2067, 0.3: 0.5819, 0.5: 0.8536, 0.8: 1.0087, 1: 1, 1.1: 1.0064}
    # The paper prints four decimals.
    assert evaluate(x, 4).tolist() == pytest.approx(level4, abs=5.1e-5)
    points = torch.tensor(list(level2), dtype=torch.float64)
    assert evaluate(points, 2).tolist() == pytest.approx(list(level2.values()), abs=5.1e-5)
    for coefficients in PRESETS.values():
        assert math.fsum(coefficients) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("level", CUTOFFS)
def test_fit_reproduces_the_published_maps(level: int) -> None:
    fitted = fit_polynomial(level, CUTOFFS[level])
    assert len(fitted) == level + 1
    assert math.fsum(fitted) == pytest.approx(1.0, abs=1e-15)
    x = torch.linspace(0, 1.1, 2001, dtype=torch.float64)
    # 5e-3: the published sets carry the noise of an unknown random sample.
    assert (evaluate(x, fitted) - evaluate(x, level)).abs().max() <= 5e-3


@pytest.mark.parametrize(("degree", "cutoff", "alpha"), [(1, 0.8, 4.0), (3, 0.5, 2.0), (4, 0.3, 0)])
def test_fit_satisfies_the_optimality_conditions(degree: int, cutoff: float, alpha: float) -> None:
    # Stationary under the constraint: the integral has the same derivative in all coefficients.
    fitted = fit_polynomial(degree, cutoff, alpha)
    x = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000 * 1.1
    gap = evaluate(x, fitted) - (x / cutoff).clamp_max(1)
    gradient = torch.stack([(x**alpha * gap * x ** (2 * j + 1)).mean() for j in range(degree + 1)])
    assert float(gradient.max() - gradient.min()) < 1e-9  # the midpoint rule's own error


@pytest.mark.parametrize(
    ("arguments", "name"), [((-1, 0.3), "degree"), ((2, 0.3, -1.0), "alpha"), ((2, 1.2), "cutoff")]
)
def test_fit_rejects(arguments: tuple[float, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        fit_polynomial(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("recover", [True, False])
@pytest.mark.parametrize("level", [*PRESETS, "over_flattening"])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (3, 9, 9), (1, 5)])
def test_gradient_is_that_of_the_definition(shape, level, recover) -> None:
    w, u, v = matrix(*shape)
    gamma = torch.rand(shape[:-2], dtype=torch.float64) + 0.5
    grad = torch.randn_like(w)
    leaves = [w.clone().requires_grad_(), gamma.clone().requires_grad_()]
    out = in_graph(leaves[0], u, v, leaves[1], level, recover)
    expected = torch.autograd.grad(out, leaves, grad)

    mine = [w.clone().requires_grad_(), gamma.clone().requires_grad_()]
    value = precondition(mine[0], u, v, mine[1], level, norm_recovery=recover)
    torch.testing.assert_close(value, out, rtol=1e-12, atol=1e-12)
    for got in (
        torch.autograd.grad(value, mine, grad),
        vjp(grad, w, u, v, gamma, level=level, norm_recovery=recover),
    ):
        torch.testing.assert_close(got[0], expected[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-9, atol=1e-11)


def test_the_gradient_without_normalisation() -> None:
    w, u, v = matrix(8, 6)
    w = (w / torch.linalg.matrix_norm(w, 2)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: precondition(x, u, v, 1.0, 2, spectral_norm="none"), (w,)
    )


def test_a_pair_that_has_lost_the_norm_is_found_anew() -> None:
    """Test a wrong pair, a pair with the wrong sign, zeros and NaN. A correct pair stays the same
    bit for bit."""
    w, u, v = matrix(5, 12, 8)
    right = u[0].clone(), v[0].clone()
    left, values, rows = torch.linalg.svd(w[1])
    u[1], v[1], u[2], u[3], v[4, 0] = left[:, -5], rows[-1], -u[2], 0, math.nan
    seen = Preconditioner().guard_(w, u, v)
    expected = [1, float(values[0] / values[-1]), -1, math.inf, math.nan]
    assert seen.tolist() == pytest.approx(expected, nan_ok=True)
    assert torch.equal(u[0], right[0]) and torch.equal(v[0], right[1])
    norms = torch.linalg.matrix_norm(w, 2)
    torch.testing.assert_close(Preconditioner().tracked_norm(w, u, v), norms, rtol=1e-6, atol=0)


def test_zero_matrix_gives_zero() -> None:
    w = torch.zeros(2, 6, 4)
    u, v = torch.zeros(2, 6), torch.zeros(2, 4)
    assert precondition(w, u, v, 1.0, 4).count_nonzero() == 0
    gradient = vjp(torch.ones_like(w), w, u, v, 1.0, level=4)
    assert gradient.weight.isfinite().all() and gradient.gamma.count_nonzero() == 0
    layer = Preconditioner(init_compensation=True)
    assert (layer.initial_gamma(w, u, v) == 1).all() and not layer.guard_(w, u, v).any()


def test_nan_stays_nan_and_in_its_matrix() -> None:
    w, u, v = matrix(2, 6, 4)
    w[0, 1, 1] = math.nan
    out = precondition(w, u, v, 1.0, 4)
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("reduce", [torch.sum, torch.linalg.vector_norm])
def test_differentiating_twice_raises(reduce: Callable[[Tensor], Tensor]) -> None:
    w, u, v = matrix(6, 4)
    w.requires_grad_()
    loss = reduce(precondition(w, u, v, 1.0, 2))
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    with pytest.raises(RuntimeError, match="precondition cannot be differentiated twice"):
        (grad + w).sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        {"level": 5},
        {"level": "flat"},
        {"level": ()},
        {"u": torch.ones(4)},
        {"v": torch.ones(6)},
        {"gamma": torch.ones(2)},
        {"spectral_norm": "svd"},
        {"w": torch.ones(6)},
    ],
)
def test_rejects(change: dict[str, object]) -> None:
    given_ = {"w": torch.ones(6, 4), "u": torch.ones(6), "v": torch.ones(4), "gamma": 1, "level": 2}
    with pytest.raises(ValueError, match=f"^{next(iter(change))} "):
        precondition(**(given_ | change))  # type: ignore[arg-type]


# torch's compiler instantiates autograd.Function, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    w, u, v = matrix(12, 8, dtype=torch.float32)
    w.requires_grad_()
    grad = torch.randn(12, 8)
    compiled = torch.compile(Preconditioner(level=3).effective, fullgraph=True, backend="aot_eager")
    out = compiled(w, u, v, torch.tensor(1.0))
    (got,) = torch.autograd.grad(out, w, grad)
    torch.testing.assert_close(out, precondition(w, u, v, 1.0, 3))
    torch.testing.assert_close(got, vjp(grad, w.detach(), u, v, 1.0, level=3).weight)
