"""The off-diagonal Gram penalty, compared with its definition and autograd."""

import itertools
import math

import pytest
import torch

from spectral.gram_penalty import gram_penalty, gram_penalty_and_grad
from tests.matrices import penalty_by_definition

OPTIONS = list(itertools.product([1, 2], ["in", "out"], [None, "frobenius", "size"]))


@pytest.mark.parametrize(("power", "side", "normalize"), OPTIONS)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (2, 3, 4, 9)])
def test_value_and_gradient_are_those_of_the_definition(shape, power, side, normalize) -> None:
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = penalty_by_definition(w, power, side, normalize)
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
def test_no_overlap_means_zero_and_a_finite_gradient(kind, power, side, normalize) -> None:
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
    # Orthogonal columns in wide matrices: E is zero, and the computed difference is float32
    # rounding of either sign.
    w = torch.zeros(64, 8, 20)
    w[:, :, :8] = torch.linalg.qr(torch.randn(64, 8, 8)).Q * torch.linspace(0.1, 3, 8)
    for power in (1, 2):
        value, grad = gram_penalty_and_grad(w, power=power)
        assert value.count_nonzero() == 0 and grad.count_nonzero() == 0


def test_published_magnitude() -> None:
    # E ~ d (d - 1) d std^4 of a Gaussian d x d matrix: 767 at std 1 / sqrt(d), d = 768.
    w = torch.randn(768, 768) / math.sqrt(768)
    assert float(gram_penalty(w)) == pytest.approx(767, rel=0.02)
    assert float(gram_penalty(w, power=1)) == pytest.approx(27.7, rel=0.01)


def test_half_precision_and_single_agree_with_double() -> None:
    w = torch.randn(20, 30, dtype=torch.bfloat16)
    value, grad = gram_penalty_and_grad(w)
    assert value.dtype == grad.dtype == torch.bfloat16
    exact, exact_grad = gram_penalty_and_grad(w.double())
    torch.testing.assert_close(value.double(), exact, rtol=2**-8, atol=0)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2**-8, atol=1e-2)
    value, grad = gram_penalty_and_grad(w.float())
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0)


def test_differentiating_twice_raises() -> None:
    w = torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(gram_penalty(w), w, create_graph=True)
    with pytest.raises(RuntimeError, match="gram_penalty cannot be differentiated twice"):
        (gram_penalty(w) + grad.sum()).backward()


@pytest.mark.parametrize("options", [{"power": 3}, {"side": "left"}, {"normalize": "width"}])
def test_rejects(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        gram_penalty(torch.ones(2, 2), **options)  # type: ignore[arg-type]
