"""On a CPU without 16-bit matmul instructions, 16-bit matmuls run in float32, in both passes."""

import pytest
import torch

from parallel.comm.groups import Groups
from spectral.kernels import library
from tests.models import drawn, losses_of
from tests.step_trace import Operations
from tests.tiny_families import tiny_model

PRODUCTS = {f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm")}


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch, world: Groups) -> torch.nn.Module:
    """A bfloat16 model on a CPU without bfloat16 instructions."""
    monkeypatch.setattr(library, "SLOW_ON_CPU", {torch.bfloat16})
    return drawn(tiny_model("llama"), torch.bfloat16)[0]


def test_no_product_of_a_step_is_bfloat16(chunk: torch.nn.Module) -> None:
    with Operations() as operations:
        losses_of(chunk).float().mean().backward()
    products = [kinds for name, kinds in operations.seen if name in PRODUCTS]
    dtypes = {dtype for kinds in products for _, dtype, _ in kinds}
    assert torch.float32 in dtypes and torch.bfloat16 not in dtypes


def test_a_linear_rounds_its_results_alone(chunk: torch.nn.Module) -> None:
    linear = chunk.decoder.layers[0].mlp.linear_fc2
    x = torch.randn(5, 2, linear.weight.shape[1]).bfloat16().requires_grad_()
    y, _ = linear(x)
    gradient = torch.randn(y.shape).bfloat16()
    y.backward(gradient)
    wide, weight = (tensor.detach().double() for tensor in (x, linear.weight))
    for found, exact in ((y, wide @ weight.T), (x.grad, gradient.double() @ weight)):
        assert found is not None and found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
