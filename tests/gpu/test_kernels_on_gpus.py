"""Kernels on a CUDA device compared with float64, and steps that do not wait for the device."""

import pytest
import torch
from torch import Tensor

from scripts.bench import tune
from spectral import msign, singular_triplets, solve_multiplier, tangent_model
from spectral.kernels import dispatch, library
from spectral.polar import coefficients, normalized, polars_of
from spectral.rules import RULES
from spectral.rules.base import take_step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(2, 64), (1, 257), (3, 1000), (1, 128), (1, 5)]
SHAPES = [(1, 64, 64), (3, 130, 257), (1, 257, 1000), (32, 128, 2048), (2, 1024, 1024)]
# One rounding of the result relative to its largest entry; float32 adds that of long sums, and
# three tensor-core products carry 22 bits.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def tiles(dtype: torch.dtype) -> tuple[dispatch.Tile, ...]:
    return tune.candidates(str(dtype).removeprefix("torch."))


def assert_close(value: Tensor, expected: Tensor) -> None:
    error = (value.double() - expected).abs().max()
    assert error <= BOUNDS[value.dtype] * expected.abs().max(), float(error)
    assert torch.equal(value, value.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    from spectral.kernels import symmetric

    x = torch.randn(shape, device="cuda").div(shape[2] ** 0.5).to(dtype)
    for view in (x, x.flip(0).contiguous().mT.contiguous().mT):
        for tile in tiles(dtype):
            assert_close(symmetric.product(view, view, tile), library.symmetric(view.double()))
            r = symmetric.product(view, view, tile)
            wide = r.double()
            expected = library.symmetric(wide, wide, wide, alpha=0.5, beta=-1.5, diagonal=2.0)
            found = symmetric.product(r, r, tile, r, alpha=0.5, beta=-1.5, gamma=2.0)
            assert_close(found, expected)
            found = symmetric.product(r, r, tile, gamma=0.5)
            assert_close(found, library.symmetric(wide, wide, diagonal=0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacks_of_different_columns(dtype: torch.dtype) -> None:
    from spectral.kernels import symmetric

    stacks = [torch.randn(b, 130, n, device="cuda").div(n**0.5).to(dtype) for b, n in SIZES]
    for tile in tiles(dtype):
        expected = torch.cat([library.symmetric(x.double()) for x in stacks])
        assert_close(symmetric.grams(stacks, tile), expected)


@pytest.mark.parametrize("shape", [(1, 2048, 2048), (4, 1024, 4096), (1, 4096, 1024)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-4), (torch.bfloat16, 3e-2), (torch.float16, 6e-3)]
)
def test_msign_is_as_accurate_as_its_dtype(shape, dtype, bound) -> None:
    """Compare the results for Gaussian matrices with the same polynomials in float64. On a CPU, the
    errors for 512 x 2048 are 3e-5, 9e-3 and 3e-3."""
    x = torch.randn(shape, device="cuda")
    steps = coefficients("polar_express", 5, dtype)
    expected = polars_of([normalized(x.double())], steps, torch.float64)[0].direction
    error = torch.linalg.matrix_norm(msign(x, steps=5, dtype=dtype).double() - expected)
    assert (error / torch.linalg.matrix_norm(expected)).max() < bound


@pytest.mark.parametrize("shape", [(2, 2048, 2048), (2, 2048, 5632)])
def test_the_direction_on_the_sphere_is_tangent(shape: tuple[int, int, int]) -> None:
    """Check |f| of SSO's direction in float32, with the tolerance used in the paper's recipes."""
    x = torch.randn(shape, device="cuda")
    sigma, u, v = singular_triplets.cold_start(torch.randn(shape, device="cuda"))
    x += 20 * u[:, :, None] * v[:, None]
    tangent = solve_multiplier(x / torch.linalg.matrix_norm(x, keepdim=True), u, v, tolerance=2e-4)
    f = torch.einsum("bm,bmn,bn->b", u.double(), tangent.direction.double(), v.double())
    assert f.abs().max() < 2e-4, f


@pytest.mark.parametrize("size", [3, 20, dispatch.SMALL])
def test_the_top_eigenvector_equals_that_of_the_library(size: int) -> None:
    x = torch.randn(5, size, 2 * size, dtype=torch.float64)
    t = x @ x.mT
    found = singular_triplets._top_eigenvector(t.cuda()).cpu()
    torch.testing.assert_close(found, singular_triplets._top_eigenvector(t), rtol=0, atol=1e-10)


def test_the_root_of_a_model_equals_that_of_the_library() -> None:
    m = torch.randn(6, 40, 72, dtype=torch.float64)
    u, v = torch.randn(6, 40).double(), torch.randn(6, 72).double()
    steps = coefficients("polar_express", 8, torch.float32)
    model = tangent_model.build([m], u, [v], steps, torch.float32)
    found = tangent_model.root(tangent_model.Model(*(field.cuda() for field in model)))
    for device, host in zip(found, tangent_model.root(model), strict=True):
        torch.testing.assert_close(device.cpu(), host, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("gated", [True, False], ids=["momentum by the kernel", "by the library"])
@pytest.mark.parametrize("shape", [(3, 96, 200), (2, 200, 96)])
def test_a_step_equals_that_of_the_cpu(shape: tuple[int, int, int], gated: bool) -> None:
    """Compare weights after three float32 steps with weight decay. The order of sums differs in
    eight msign steps."""
    rule = RULES["muon"]()
    sides = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        weight, gradients = torch.randn(shape).to(device), torch.randn(3, *shape).to(device)
        state = rule.init_state(weight)
        gate = torch.ones((), dtype=torch.bool, device=device) if gated else None
        for gradient in gradients:
            report = take_step(rule, weight, gradient, state, lr=0.1, weight_decay=0.5, active=gate)
        sides.append((weight.cpu(), report["update_rms"].cpu()))
    torch.testing.assert_close(*sides, rtol=0, atol=1e-4)
