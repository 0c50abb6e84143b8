"""Compare backward-pass kernels in Triton's interpreter with autograd.

tests/unit/spectral/test_kernels.py starts `TRITON_INTERPRET=1 pytest` on this file.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.blocks.activation import ACTIVATIONS, with_one_gradient
from models.blocks.rotary import rotate_halves
from models.blocks.self_attention import HeadFunctions, split_heads
from spectral.kernels import gated, heads

# Relative to a result's largest entry: sums in another order; bfloat16 results and turns are
# rounded, which the interpreter does by truncation.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6}


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a random tensor that requires gradients."""
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that `found` equals the float64 `expected` up to rounding to its dtype."""
    for value, reference in zip(found, expected, strict=True):
        assert value.shape == reference.shape
        if reference.numel():
            error = (value.double() - reference).abs().max()
            assert error <= BOUNDS[value.dtype] * reference.abs().max(), float(error)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 70), (0, 8), (2, 1)])
def test_gated_activations(name, scaled, shape, dtype) -> None:
    """A large gate must not overflow, and the gradient of the result may have any strides."""
    *rows, cols = shape
    wide = drawn(*rows, 2 * cols, dtype=dtype)
    with torch.no_grad():
        wide[..., 1:cols:3], wide[..., 2:cols:3] = 90.0, -90.0
    factors = [drawn(*rows, dtype=torch.promote_types(dtype, torch.float32))] if scaled else []
    activation = ACTIVATIONS[name]
    plain = activation.scaled if scaled else activation.block
    function = with_one_gradient(activation, plain)
    assert function is not plain
    upstream = torch.randn(*shape[::-1], dtype=torch.float64).permute(*range(len(shape))[::-1])
    result = function(wide, *factors)
    assert result.dtype == dtype
    exact = doubled(wide, *factors)
    upstream = upstream.to(dtype)
    assert_close(
        torch.autograd.grad(result, [wide, *factors], upstream),
        torch.autograd.grad(plain(*exact), exact, upstream.double()),
    )


def test_a_wide_row_takes_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "BLOCK", 16)
    test_gated_activations("swiglu", True, (2, 3, 37), torch.float32)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("s", "b", "groups", "ratio", "size"), [(5, 2, 2, 3, 8), (9, 1, 1, 1, 6), (1, 3, 20, 1, 2)]
)
def test_heads(s, b, groups, ratio, size, documents, normed, dtype) -> None:
    """Test more heads and tokens than a program processes at a time, half heads whose size is not a
    power of two, and different positions in each sequence."""
    mixed = drawn(s, b, groups, (ratio + 2) * size, dtype=dtype)
    gains = [drawn(size, dtype=dtype) for _ in range(2 * normed)]
    angles = torch.rand(s, b if documents else 1, 1, size // 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    turns = torch.cat([cos, cos, -sin, sin], -1).to(torch.promote_types(dtype, torch.float32))
    epsilon = 2.0**-10
    functions = HeadFunctions(backward=heads.gradients)
    results = split_heads(mixed, turns, gains, epsilon, functions)
    # As a fused kernel of attention returns them, `[b, heads, s, d]`.
    upstream = [torch.randn(x.shape, dtype=dtype).transpose(0, 1).contiguous() for x in results]
    upstream = [x.transpose(0, 1) for x in upstream]

    def plain(mixed: Tensor, *gains: Tensor) -> list[Tensor]:
        parts = mixed.unflatten(3, (ratio + 2, size))
        query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        if gains:
            query, key = (
                x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gain
                for x, gain in zip((query, key), gains, strict=True)
            )
        return [*rotate_halves(query, key, turns.double()), value]

    exact = doubled(mixed, *gains)
    assert_close(
        torch.autograd.grad(results, [mixed, *gains], upstream),
        torch.autograd.grad(plain(*exact), exact, [x.double() for x in upstream]),
    )


def test_gradients_that_are_not_dense() -> None:
    """Test strided gradients of queries, and expanded gradients of values such as the gradient of a
    sum."""
    query, key = torch.randn(4, 2, 6, 16)[..., ::2], torch.randn(4, 2, 3, 8)
    value = torch.ones(()).expand(4, 2, 3, 8)
    turns = torch.randn(4, 1, 1, 1, 16)
    expected = HeadFunctions().backward(query, key, value, turns, 1e-5)
    torch.testing.assert_close(heads.gradients(query, key, value, turns, 1e-5), expected)
