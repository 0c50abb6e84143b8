"""Products of 16 bits on a CPU without instructions for them go through float32, in both passes."""

from collections.abc import Iterator

import pytest
import torch

from parallel.comm.groups import Groups
from spectral.kernels import library
from tests.families import tiny_model
from tests.models import drawn, tokens_of

ROUNDING = 2**-8


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[torch.dtype]]:
    """The types of what this CPU multiplies, as one without instructions for bfloat16."""
    found: set[torch.dtype] = set()
    monkeypatch.setattr(library, "SLOW_ON_CPU", {torch.bfloat16})

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
                found.update(x.dtype for x in args if isinstance(x, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Seen():
        yield found


def test_no_product_of_a_step_is_bfloat16(seen: set[torch.dtype], world: Groups) -> None:
    chunk, _ = drawn(tiny_model("llama"), torch.bfloat16)
    tokens, labels = tokens_of(2, 16, 60)
    chunk(tokens, torch.zeros_like(tokens), None, labels=labels).float().mean().backward()
    assert torch.float32 in seen and torch.bfloat16 not in seen


def test_a_linear_rounds_its_results_alone(seen: set[torch.dtype], world: Groups) -> None:
    chunk, _ = drawn(tiny_model("llama"), torch.bfloat16)
    linear = chunk.decoder.layers[0].mlp.linear_fc2
    x = torch.randn(5, 2, linear.weight.shape[1]).bfloat16().requires_grad_()
    y, _ = linear(x)
    gradient = torch.randn(y.shape).bfloat16()
    y.backward(gradient)
    wide, weight = (tensor.detach().double() for tensor in (x, linear.weight))
    for found, exact in ((y, wide @ weight.T), (x.grad, gradient.double() @ weight)):
        assert found is not None and found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=ROUNDING, atol=1e-4)
