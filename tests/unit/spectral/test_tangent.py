"""The multiplier solver, compared with float64 SVD references and published values."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectral import msign, solve_multiplier, tangent_model
from spectral.polar import CACHE_ELEMENTS, coefficients
from spectral.tangent import Solver, TangentProblem, TangentSolution, default_evaluations
from spectral.tangent_model import SPACES, Space, build, root, value
from tests.matrices import gaussian, msign_by_svd, spectrum

MOMENTA = Path(__file__).parents[2] / "data" / "momenta.safetensors"
TOLERANCE = 2e-4
RHOS = (0.0, 0.1, -0.1, 0.5, -0.5, 0.9, -0.9)

Problem = tuple[Tensor, Tensor, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def low_rank(rows: int, cols: int, seed: int) -> Tensor:
    """Return a matrix with singular values k^-1.5 up to rank min(rows, cols) / 8, plus Gaussian
    noise with 1% of its Frobenius norm."""
    rank = max(1, min(rows, cols) // 8)
    decay = torch.arange(1, rank + 1, dtype=torch.float64) ** -1.5
    noise = gaussian(rows, cols, seed=seed + 2)
    return unit(spectrum(decay, rows, cols, seed)) + 0.01 * unit(noise)


def problems(make: Callable[..., Tensor], rows: int, cols: int, rhos: tuple[float, ...]) -> Problem:
    """Return a float32 batch of `M = rho Theta + sqrt(1 - rho^2) M0` with Frobenius norm 1."""
    items = []
    for rho in rhos:
        for seed in range(3):
            u = unit(gaussian(rows, 1, seed=seed + 50))[:, 0]
            v = unit(gaussian(cols, 1, seed=seed + 70))[:, 0]
            m = rho * torch.outer(u, v) + math.sqrt(1 - rho**2) * unit(make(rows, cols, seed=seed))
            items.append((unit(m).float(), u.float(), v.float()))
    m, u, v = (torch.stack(x) for x in zip(*items, strict=True))
    return m, u, v


def polar(x: Tensor) -> Tensor:
    """Return the exact polar factor."""
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return left @ right


def limits_at_zero(m: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Find the sign change of `f` by bisection, and return the exact polar factors of `M + lambda
    Theta` and the values of `f` on both sides of it."""
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        below = (theta * polar(m + middle * theta)).sum() < 0
        low, high = (middle, high) if below else (low, middle)
    left, right = (polar(m + each * theta) for each in (low, high))
    return left, right, (theta * left).sum().item(), (theta * right).sum().item()


def momenta() -> list[Problem]:
    """Return the momenta recorded during training, one batch per shape."""
    stored = load_file(MOMENTA)
    groups: dict[tuple[int, ...], list[Problem]] = {}
    for i in range(sum(name.startswith("momentum.") for name in stored)):
        m = unit(stored[f"momentum.{i}"].float())
        groups.setdefault(tuple(m.shape), []).append((m, stored[f"u.{i}"], stored[f"v.{i}"]))
    return [tuple(map(torch.stack, zip(*g, strict=True))) for g in groups.values()]  # type: ignore[misc]


def check_honest(solution: TangentSolution, m: Tensor, u: Tensor, v: Tensor) -> None:
    """Check that the residual belongs to the returned direction, and that `converged` compares it
    with the tolerance."""
    measured = torch.einsum("bi,bij,bj->b", u.double(), solution.direction.double(), v.double())
    torch.testing.assert_close(solution.residual.double(), measured, rtol=0, atol=2e-6)
    assert (solution.residual.abs() <= TOLERANCE)[solution.converged].all()
    missed = ~solution.converged
    empty = solution.direction.abs().amax((-2, -1)) == 0
    assert ((solution.residual.abs() > TOLERANCE) | empty)[missed].all()


@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48), (300, 320)])
@pytest.mark.parametrize("make", [gaussian, low_rank])
def test_converges_on_every_alignment(make: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    m, u, v = problems(make, *shape, RHOS if max(shape) < 300 else (0.0, 0.9))
    solution = solve_multiplier(m, u, v, max_evaluations=12, early_exit=True)
    assert solution.converged.all()
    check_honest(solution, m, u, v)
    assert solution.evaluations.float().mean() <= 3.0
    assert solution.evaluations.max() <= 6


def test_evaluations_on_recorded_momenta() -> None:
    """Test early exit. Bisection from a bracket of 1e-3 needs 16.8 evaluations on these momenta."""
    solutions = [
        solve_multiplier(*batch, max_evaluations=12, early_exit=True) for batch in momenta()
    ]
    evaluations = torch.cat([s.evaluations for s in solutions]).float()
    assert len(evaluations) >= 20
    assert torch.cat([s.converged for s in solutions]).all()
    assert evaluations.mean() <= 1.1
    assert evaluations.max() <= 2


def test_the_default_evaluations_on_recorded_momenta() -> None:
    """The largest |f| is 1.8e-5. With ten shifts of one power each, it would be 2.8e-5."""
    solutions = [solve_multiplier(*batch) for batch in momenta()]
    assert torch.cat([s.converged for s in solutions]).all()
    assert torch.cat([s.residual.abs() for s in solutions]).max() <= 2.8e-5


def rank_deficient(rows: int, cols: int, seed: int) -> Tensor:
    return gaussian(rows, rows // 2, seed=seed) @ gaussian(rows // 2, cols, seed=seed + 1)


def decaying(rows: int, cols: int, seed: int) -> Tensor:
    """Return a matrix with geometrically spaced singular values from 1 to 1e-3."""
    return spectrum(torch.logspace(0, -3, rows, dtype=torch.float64), rows, cols, seed)


@pytest.mark.parametrize("make", [gaussian, low_rank, rank_deficient, decaying])
def test_two_shifts_are_as_exact_as_ten(make, monkeypatch) -> None:
    """The errors after one evaluation agree up to rounding and the error of the partial
    fractions."""
    problem = problems(make, 128, 160, RHOS)
    few = solve_multiplier(*problem).residual.abs()
    ten = Space(tuple(10.0 ** (-3.6 + 3.2 * i / 9) for i in range(10)))
    monkeypatch.setitem(SPACES, torch.float32, ten)
    many = solve_multiplier(*problem).residual.abs()
    assert few.max() <= TOLERANCE and few.max() <= many.max() + 2e-6


def test_a_second_evaluation_where_float64_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for slow float64 misses the tolerance on nearly low-rank matrices. A second
    evaluation corrects most of them."""
    capabilities = {"fast": (9, 0), "slow": (10, 3), "consumer": (8, 9)}
    found = {}
    for name, capability in capabilities.items():
        tangent_model.has_fast_doubles.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        device = torch.device("cuda")
        found[name] = [default_evaluations(n, torch.float32, device) for n in (256, 257)]
        assert default_evaluations(2048, torch.bfloat16, device) == 1
    tangent_model.has_fast_doubles.cache_clear()
    assert found == {"fast": [1, 1], "slow": [1, 2], "consumer": [1, 2]}
    monkeypatch.setattr(tangent_model, "WIDE_ROWS", 0)
    problem = problems(low_rank, 128, 160, RHOS)
    once, twice = (solve_multiplier(*problem, max_evaluations=n).residual.abs() for n in (1, 2))
    assert (once > TOLERANCE).sum() >= 2 * (twice > TOLERANCE).sum()
    assert once.max() > 5 * twice.max()


GOLDEN = [
    # rows, cols, seed, f(0), lambda*, <M, direction>; exact polar factor, float64 SVD
    (16, 16, 0, -0.16142526, 0.049629874, 3.34772872),
    (32, 16, 0, -0.01976243, 0.004582483, 3.68226020),
    (16, 32, 0, -0.13882014, 0.038177734, 3.66991548),
    (64, 128, 0, 0.11622028, -0.016299940, 7.44534723),
    (128, 64, 0, 0.07515211, -0.010997699, 7.45228234),
]


@pytest.mark.parametrize("rows, cols, seed, at_zero, expected, gain", GOLDEN)
def test_golden_values(rows, cols, seed, at_zero, expected, gain) -> None:
    m = unit(torch.randn(rows, cols, generator=generator(seed)).double())
    w = torch.randn(rows, cols, generator=generator(1000 + seed)).double()
    left, _, right = torch.linalg.svd(w)
    batch = m[None], left[None, :, 0], right[None, 0]
    # Fourteen steps: quadratic convergence to the exact polar factor.
    exact = solve_multiplier(*batch, tolerance=1e-10, max_evaluations=12, early_exit=True, steps=14)
    assert exact.converged.all()
    assert exact.multiplier.item() == pytest.approx(expected, abs=1e-8)
    assert (m * exact.direction[0]).sum().item() == pytest.approx(gain, abs=1e-7)
    plain = msign(batch[0][0], steps=14)
    assert (batch[1][0] @ plain @ batch[2][0]).item() == pytest.approx(at_zero, abs=1e-7)
    single = solve_multiplier(*(x.float() for x in batch), early_exit=True)
    assert single.converged.all()
    assert single.multiplier.item() == pytest.approx(expected, abs=1e-4)


def test_counterexample_beyond_the_usual_bracket() -> None:
    """lambda* = 2 / sqrt(3) is outside the bracket +-1.023, to which the public reference is
    limited."""
    m = torch.tensor([[[-3.0, 1.0], [1.0, 1.0]]]) / math.sqrt(12)
    e = torch.tensor([[1.0, 0.0]])
    solution = solve_multiplier(m, e, e, max_evaluations=12, early_exit=True)
    assert solution.converged.all()
    assert solution.multiplier.item() == pytest.approx(2 / math.sqrt(3), abs=1e-3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("shape", [(1, 8), (8, 24), (24, 8), (300, 310)])
def test_momentum_along_theta_has_no_direction(sign: float, shape: tuple[int, int]) -> None:
    """Nothing remains to be orthogonalised, so the step is zero and is reported, instead of being
    noise."""
    u, v = (
        unit(gaussian(shape[0], 1, seed=3)).mT.float(),
        unit(gaussian(shape[1], 1, seed=4)).mT.float(),
    )
    m = sign * u[:, :, None] * v[:, None]
    solution = solve_multiplier(m, u, v)
    assert not solution.converged.any()
    assert solution.multiplier.item() == pytest.approx(-sign, abs=1e-3)
    assert not solution.direction.any() or solution.residual.abs().item() > TOLERANCE


def test_zero_momentum_and_zero_weight() -> None:
    u, v = torch.zeros(1, 5), torch.zeros(1, 9)
    m = gaussian(5, 9).float()[None]
    free = solve_multiplier(m, u, v)
    assert free.multiplier.item() == 0 and free.converged.all()
    torch.testing.assert_close(torch.linalg.svdvals(free.direction), torch.ones(1, 5))
    u[0, 0] = v[0, 0] = 1.0
    still = solve_multiplier(torch.zeros_like(m), u, v)
    assert still.multiplier.item() == 0 and not still.direction.any()


def test_nan_is_reported_not_hidden() -> None:
    m, u, v = problems(gaussian, 8, 12, (0.5,))
    m[1, 2, 3] = torch.nan
    solution = solve_multiplier(m, u, v)
    assert solution.converged.tolist() == [True, False, True]
    assert solution.direction[1].isnan().any()


def test_a_first_guess_whose_iteration_is_not_bounded_is_replaced(monkeypatch) -> None:
    """The inner product of the first guess is NaN. The next evaluation, in the middle of the
    bracket, replaces it."""
    problem = [x.double() for x in problems(gaussian, 8, 12, (0.5,))]
    expected = solve_multiplier(*problem, max_evaluations=12)

    def guess(model: tangent_model.Model) -> tuple[torch.Tensor, torch.Tensor]:
        offset, slope = root(model)
        return torch.where(offset == offset[1], torch.nan, offset), slope

    monkeypatch.setattr(tangent_model, "root", guess)
    solution = solve_multiplier(*problem, max_evaluations=12)
    assert solution.converged.all() and solution.evaluations[1] > expected.evaluations[1]
    torch.testing.assert_close(solution.multiplier, expected.multiplier, rtol=0, atol=1e-3)


@pytest.mark.parametrize("evaluations", [1, 2])
@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24), (2, 1200, 1000)])
def test_directions_take_the_buffers_of_rules_alone(shape, evaluations) -> None:
    generator = torch.Generator().manual_seed(6)
    m = torch.randn(shape, generator=generator) / (shape[1] * shape[2]) ** 0.5
    u = torch.nn.functional.normalize(torch.randn(shape[:2], generator=generator), dim=-1)
    v = torch.nn.functional.normalize(torch.randn(shape[0], shape[2], generator=generator), dim=-1)
    options, before = {"steps": 3, "max_evaluations": evaluations}, m.clone()
    plain = solve_multiplier(m, u, v, **options)
    assert torch.equal(m, before)
    (over,) = Solver(**options).solve([TangentProblem(m, u, v)])
    assert over.direction.data_ptr() == m.data_ptr()
    assert over.removed is plain.removed is None  # in float32
    for name in set(TangentSolution._fields) - {"removed"}:
        assert torch.equal(getattr(over, name), getattr(plain, name)), name


@pytest.mark.parametrize("rows", [24, 72])
def test_the_model_agrees_with_an_svd_and_the_bracket_holds(rows, monkeypatch) -> None:
    """The linear systems are solved one at a time."""
    monkeypatch.setitem(CACHE_ELEMENTS, "cpu", rows**2)
    m, u, v = (x.double() for x in problems(low_rank, rows, rows + 16, RHOS))
    steps = coefficients("polar_express", 8)
    model = build([m], u, [v], steps, torch.float64)
    offset, slope = root(model)
    found, low, high = (model.centre + x for x in (offset, -model.half, model.half))

    def exact(lam: Tensor) -> Tensor:
        z = m + lam[:, None, None] * u[:, :, None] * v[:, None]
        return torch.einsum("bi,bij,bj->b", u, msign_by_svd(z, "polar_express", 8), v)

    # The remaining errors are the partial fractions, the fixed norm, and with 72 rows the basis.
    torch.testing.assert_close(exact(found), torch.zeros_like(found), rtol=0, atol=5e-4)
    delta = 1e-4
    difference = (exact(found + delta) - exact(found - delta)) / (2 * delta)
    torch.testing.assert_close(slope, difference, rtol=0.05, atol=0)
    assert (exact(low) <= 1e-9).all() and (exact(high) >= -1e-9).all()
    grid = model.half[:, None] * torch.linspace(-1, 1, 200).double()
    assert ((value(model, grid) > 0).int().diff().abs().sum(-1) == 1).all()  # one sign change


@pytest.fixture(scope="module")
def exact() -> list[list[tuple[float, Tensor]]]:
    """The multiplier and the direction for every recorded momentum, by shape."""
    return [[exact_solution(*x) for x in zip(*batch, strict=True)] for batch in momenta()]


def exact_solution(m: Tensor, u: Tensor, v: Tensor) -> tuple[float, Tensor]:
    """Return the multiplier and the direction for one matrix in float64, found by bisection with
    SVDs."""
    m, u, v = m.double(), u.double(), v.double()
    theta = torch.outer(u, v)
    low, high = -2.0, 2.0
    while True:
        middle = (low + high) / 2
        direction = msign_by_svd(m + middle * theta, "polar_express", 8)
        f = (theta * direction).sum().item()
        if abs(f) < 1e-7 or high - low < 1e-13:
            return middle, direction
        low, high = (low, middle) if f > 0 else (middle, high)


@pytest.mark.parametrize(
    ("dtype", "multiplier", "error"),
    [(torch.float16, 1e-4, 0.05), (torch.bfloat16, 1e-3, 0.3)],
    ids=["float16", "bfloat16"],
)
def test_one_evaluation_in_16_bits_is_tangent(dtype, multiplier, error, exact) -> None:
    """On recorded momenta, the root of the model is right, rounding errors along Theta are removed,
    and the linear objective equals that of the exact direction.

    The relative error of the direction equals the error of msign in these dtypes at small singular
    values.
    """
    worst = 0.0
    for (m, u, v), expected in zip(momenta(), exact, strict=True):
        solution = solve_multiplier(m, u, v, dtype=dtype, max_evaluations=1, tolerance=1e-5)
        f = torch.einsum("bi,bij,bj->b", u.double(), solution.direction.double(), v.double())
        assert solution.converged.all() and f.abs().max() < 1e-5
        assert solution.removed is not None
        assert 1e-5 < solution.removed.abs().max() < (0.05 if dtype == torch.float16 else 0.1)
        for i, (lam, best_direction) in enumerate(expected):
            direction = solution.direction[i].double()
            distance = ((direction - best_direction).norm() / best_direction.norm()).item()
            assert abs(solution.multiplier[i].item() - lam) < multiplier
            assert distance < error
            gain, best = ((m[i].double() * d).sum() for d in (direction, best_direction))
            assert abs(gain / best - 1) < 2e-3
            assert torch.linalg.matrix_norm(direction, 2) < 1.03
            worst = max(worst, distance)
    assert worst > error / 10  # the bound is about that of the dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_reported_honestly(dtype, monkeypatch) -> None:
    """A component along Theta is only removed if rounding can explain it."""
    m, u, v = problems(gaussian, 64, 128, (0.0, 0.5))
    solution = solve_multiplier(m, u, v, dtype=dtype)
    check_honest(solution, m, u, v)
    assert solution.residual.abs().max() < 1e-2
    # A model of one resolvent has a larger error.
    m, u, v = problems(low_rank, 64, 96, RHOS)
    monkeypatch.setitem(SPACES, dtype, Space((10**-3.6,)))
    poor = solve_multiplier(m, u, v, dtype=dtype, max_evaluations=1)
    check_honest(poor, m, u, v)
    assert (~poor.converged).any() and poor.converged.any()
    assert poor.residual[~poor.converged].abs().min() > 0.05


def test_empty_batch_and_errors() -> None:
    m, u, v = torch.zeros(0, 3, 4), torch.zeros(0, 3), torch.zeros(0, 4)
    assert solve_multiplier(m, u, v).direction.shape == (0, 3, 4)
    for name in ("max_evaluations", "tolerance"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            solve_multiplier(m, u, v, **{name: 0})
    with pytest.raises(ValueError, match="m, u, v must have"):
        solve_multiplier(m, v, u)
    with pytest.raises(ValueError, match="m must be float32 or float64"):
        solve_multiplier(m.bfloat16(), u, v)


@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("size", [3, 64, 256])
@pytest.mark.parametrize("rows", [1, 64, 65, 200])
def test_systems_in_blocks_are_solved(rows, size, joined, monkeypatch) -> None:
    monkeypatch.setattr(tangent_model, "block_rows", lambda rows, device: size)
    monkeypatch.setattr(tangent_model, "joined_blocks", lambda device: joined)
    half, x = gaussian(3, rows, rows + 8), gaussian(3, 2, rows, seed=1)
    k = half @ half.mT + torch.eye(rows)
    factor = tangent_model.factorized_(torch.triu(k))  # the lower triangle is not read
    assert torch.allclose(tangent_model.solve(factor, x), torch.linalg.solve(k, x.mT).mT)


def test_where_exact_f_jumps_over_zero_the_direction_is_the_optimum() -> None:
    """For a square matrix, `M + lambda Theta` is singular for one lambda. If f has no root there, a
    tangent direction lies between the limits from both sides, and no tangent direction has a larger
    product with M."""
    jumps = 0
    for seed in range(40):
        m = unit(gaussian(16, 16, seed=seed))
        u, v = (unit(gaussian(16, 1, seed=seed + k))[:, 0] for k in (500, 700))
        left, right, low, high = limits_at_zero(m, torch.outer(u, v))
        if high - low < 1e-2:
            continue
        jumps += 1
        best = (high * left - low * right) / (high - low)
        solution = solve_multiplier(m[None], u[None], v[None], tolerance=TOLERANCE)
        found = solution.direction[0]
        assert solution.converged.all() and abs(u @ found @ v) <= TOLERANCE
        assert torch.linalg.matrix_norm(found, 2) < 1 + 1e-3
        assert (m * found).sum() == pytest.approx((m * best).sum().item(), rel=1e-3)
    assert jumps >= 2
