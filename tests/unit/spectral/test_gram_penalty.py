"""The off-diagonal Gram penalty against its definition and autograd."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spectral.gram_penalty import gram_penalty, gram_penalty_and_grad

OPTIONS = list(itertools.product([1, 2], ["in", "out"], [None, "frobenius", "size"]))


def definition(w: Tensor, power: int, side: str, normalize: str | None) -> Tensor:
    gram = w.mT @ w if side == "in" else w @ w.mT
    n = gram.shape[-1]
    off = gram * (1 - torch.eye(n, dtype=w.dtype))
    energy = off.square().sum((-2, -1))
    if normalize == "frobenius":
        energy = energy / w.square().sum((-2, -1)).square()
    elif normalize == "size":
        energy = energy / (n * (n - 1))
    return energy if power == 2 else energy.sqrt()


@pytest.mark.parametrize(("power", "side", "normalize"), OPTIONS)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (2, 3, 4, 9)])
def test_value_and_gradient_are_those_of_the_definition(
    shape: tuple[int, ...], power: int, side: str, normalize: str | None
) -> None:
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = definition(w, power, side, normalize)
    weights = torch.rand(expected.shape, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), w)

    options = {"power": power, "side": side, "normalize": normalize}
    value = gram_penalty(w, **options)
    (grad,) = torch.autograd.grad((value * weights).sum(), w)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-11)

    value, grad = gram_penalty_and_grad(w.detach(), **options)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        weights[..., None, None] * grad, expected_grad, rtol=1e-10, atol=1e-11
    )


@pytest.mark.parametrize(("power", "side", "normalize"), OPTIONS)
@pytest.mark.parametrize("kind", ["zero", "orthogonal", "one column", "one row"])
def test_no_overlap_means_zero_and_a_finite_gradient(
    kind: str, power: int, side: str, normalize: str | None
) -> None:
    w = {
        "zero": torch.zeros(3, 4, 6),
        "orthogonal": torch.linalg.qr(torch.randn(3, 6, 6)).Q,
        "one column": torch.randn(3, 6, 1),
        "one row": torch.randn(3, 1, 6),
    }[kind]
    side = {"one column": "in", "one row": "out"}.get(kind, side)
    value, grad = gram_penalty_and_grad(w, power=power, side=side, normalize=normalize)
    # Orthogonal columns overlap by the rounding of float32: 6 entries of 1e-7.
    assert value.max() < 1e-5 and grad.isfinite().all()
    if kind != "orthogonal":
        assert value.count_nonzero() == 0 and grad.count_nonzero() == 0


def test_small_gram_reads_rounding_as_zero() -> None:
    # Orthogonal columns in wide matrices: E is zero, and the difference it is computed from is the
    # rounding of float32, of either sign.
    w = torch.zeros(64, 8, 20)
    w[:, :, :8] = torch.linalg.qr(torch.randn(64, 8, 8)).Q * torch.linspace(0.1, 3, 8)
    for power in (1, 2):
        value, grad = gram_penalty_and_grad(w, power=power)
        assert value.count_nonzero() == 0 and grad.count_nonzero() == 0


@pytest.mark.parametrize("normalize", ["frobenius", "size"])
def test_normalised_energy_of_a_gaussian_does_not_depend_on_the_width(normalize: str) -> None:
    values = []
    for width in (64, 256):
        w = torch.randn(width, width, dtype=torch.float64) / math.sqrt(width)
        # E[E] = n - 1 and ||W||_F^4 = n^2
        values.append(width * float(gram_penalty(w, normalize=normalize)))
    assert values[0] == pytest.approx(values[1], rel=0.1)  # sampling noise of 64^2 entries


def test_published_magnitude() -> None:
    # E ~ d (d - 1) d std^4 of a Gaussian d x d matrix: 767 at std 1 / sqrt(d), d = 768.
    w = torch.randn(768, 768) / math.sqrt(768)
    assert float(gram_penalty(w)) == pytest.approx(767, rel=0.02)
    assert float(gram_penalty(w, power=1)) == pytest.approx(27.7, rel=0.01)


def test_wide_matrix_has_the_welch_floor() -> None:
    # At most `rows` of the `cols` columns can be orthogonal: E >= tr^2 / rows - sum_j |w_j|^4.
    w = torch.linalg.qr(torch.randn(24, 6, dtype=torch.float64)).Q.mT
    floor = 6.0**2 / 6 - float(w.square().sum(0).square().sum())
    assert float(gram_penalty(w)) == pytest.approx(floor, rel=1e-12)
    assert float(gram_penalty(w, side="out")) == pytest.approx(0, abs=1e-25)


def test_half_precision_and_single_agree_with_double() -> None:
    w = torch.randn(20, 30, dtype=torch.bfloat16)
    value, grad = gram_penalty_and_grad(w)
    assert value.dtype == grad.dtype == torch.bfloat16
    exact, exact_grad = gram_penalty_and_grad(w.double())
    torch.testing.assert_close(value.double(), exact, rtol=2**-8, atol=0)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2**-8, atol=1e-2)
    value, grad = gram_penalty_and_grad(w.float())
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0)


# torch's compiler instantiates autograd.Function, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_compiles_into_one_graph(shape: tuple[int, int]) -> None:
    w = torch.randn(shape, requires_grad=True)
    compiled = torch.compile(gram_penalty, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(w, power=1, normalize="frobenius"), w)
    expected = gram_penalty_and_grad(w.detach(), power=1, normalize="frobenius")[1]
    torch.testing.assert_close(grad, expected)


def test_differentiating_twice_raises() -> None:
    w = torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(gram_penalty(w), w, create_graph=True)
    with pytest.raises(RuntimeError, match="gram_penalty can be differentiated only once"):
        (gram_penalty(w) + grad.sum()).backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 3}, "power must be 1 or 2, got 3"),
        ({"side": "left"}, "side must be 'in' or 'out', got 'left'"),
        ({"normalize": "width"}, "normalize must be None, 'frobenius' or 'size', got 'width'"),
    ],
)
def test_rejects(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gram_penalty(torch.ones(2, 2), **options)  # type: ignore[arg-type]


@given(
    rows=st.integers(1, 10),
    cols=st.integers(1, 10),
    power=st.sampled_from([1, 2]),
    side=st.sampled_from(["in", "out"]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_value_is_homogeneous_of_degree_two_power(
    rows: int, cols: int, power: int, side: str, scale: float
) -> None:
    w = torch.randn(rows, cols, dtype=torch.float64)
    one, many = (gram_penalty(x, power=power, side=side) for x in (w, scale * w))  # type: ignore[arg-type]
    assert one >= 0
    torch.testing.assert_close(many, scale ** (2 * power) * one, rtol=1e-9, atol=0)
