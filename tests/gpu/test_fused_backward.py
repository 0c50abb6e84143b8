"""Kernels of backward passes on a CUDA device, compared with autograd in float64 on the same
numbers."""

import pytest
import torch
from torch import Tensor

from models.blocks.activation import ACTIVATIONS, with_one_gradient
from models.blocks.self_attention import heads_gradients
from spectral.kernels import heads

# Relative to the whole gradient: one rounding, and in 16 bits also rounded turns.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert (found.double() - exact).norm() < BOUNDS[found.dtype] * exact.norm()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    activation = ACTIVATIONS[name]
    wide = torch.randn(1000, 2 * 5632, device="cuda").to(dtype).requires_grad_()
    scale = torch.rand(1000, device="cuda", requires_grad=True)
    upstream = torch.randn(1000, 5632, device="cuda").to(dtype)
    function = with_one_gradient(activation, activation.scaled)
    found = torch.autograd.grad(function(wide, scale), [wide, scale], upstream)
    exact = [x.detach().double().requires_grad_() for x in (wide, scale)]
    expected = torch.autograd.grad(activation.scaled(*exact), exact, upstream.double())
    for gradient, reference in zip(found, expected, strict=True):
        assert_near(gradient, reference)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("normed", [False, True])
def test_heads(normed: bool, dtype: torch.dtype) -> None:
    s, b, groups, ratio, size = 500, 2, 4, 5, 128

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    angles = torch.rand(s, 1, 1, 1, size // 2, device="cuda")
    turns = torch.cat([angles.cos(), angles.cos(), -angles.sin(), angles.sin()], -1)
    given = [drawn(b, n, s, size).permute(2, 0, 1, 3) for n in (groups * ratio, groups, groups)]
    of_group = drawn(s, b, groups, ratio + 2, size)
    parts = [of_group[..., :-2, :], of_group[..., -2:-1, :], drawn(size), drawn(size)]
    parts = parts if normed else []
    found = heads.gradients(*given, turns, 1e-5, *parts)
    exact = [x.double() for x in (*given, turns)]
    expected = heads_gradients(*exact, 1e-5, *(x.double() for x in parts))
    for gradient, reference in zip(found, expected, strict=True):
        assert_near(gradient, reference)
