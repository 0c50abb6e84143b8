"""Compiled norms, rotary embeddings and activations give equal results, and no graph is compiled
twice."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from models.blocks.activation import ACTIVATIONS
from models.blocks.compiled import Fused, fuse_blocks_, some_tokens
from models.blocks.norm import RMSNorm
from parallel.comm.groups import Groups
from tests.models import drawn, losses_of, tokens_of
from tests.slow_cases import slow_but
from tests.tiny_families import MIXTURE, SETTINGS, tiny_model
from tests.tiny_families import MODELS as TINY
from training.config import InvalidConfigError, load_config
from training.errors import ConfigError
from training.machine.backends import check_backends

# torch.compile reads the gradient of every input, also of non-leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

MODELS = {
    **{name: tiny_model(name) for name in SETTINGS},
    "gpt with geglu": tiny_model("gpt", activation="geglu"),
    "grouped": tiny_model("moe", moe={**MIXTURE, "backend": "grouped"}),
    "all biases": TINY["all biases"],
}


@pytest.fixture(autouse=True)
def _no_graphs_before() -> Iterator[None]:
    """Clear all compiled graphs before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses_and_gradients(chunk: torch.nn.Module) -> list[Tensor]:
    """Return token losses and the gradient of every parameter."""
    chunk.zero_grad()
    losses = losses_of(chunk)
    losses.mean().backward()
    return [losses.detach(), *(p.grad.clone() for p in chunk.parameters())]


@pytest.mark.parametrize("name", slow_but(("all biases", "grouped"), MODELS))
def test_compiled_graphs_compute_what_single_operations_do(name: str, world: Groups) -> None:
    dtype = torch.float32 if name == "grouped" else torch.float64
    plain, fused = (drawn(MODELS[name], dtype)[0] for _ in range(2))
    modules = fuse_blocks_([fused], "aot_eager")
    assert modules >= 2 * 4 + 1  # two norms, attention and feed-forward of each layer, final norm
    expected, found = losses_and_gradients(plain), losses_and_gradients(fused)
    # The same operations in another order differ by a few roundings of the dtype.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_sums_that_are_left_to_norms_are_recomputed(recompute: str, world: Groups) -> None:
    """Each pass over a layer computes one residual sum per norm, except for the first and the last
    norm."""
    plain, _ = drawn(MODELS["llama"], torch.float64)
    fused, _ = drawn(MODELS["llama"], torch.float64, recompute=recompute)
    fuse_blocks_([fused], "eager")
    sums = []
    for norm in (m for m in fused.modules() if isinstance(m, RMSNorm) and m.sum is not None):
        count = partial(lambda sum_, *terms: sums.append(1) or sum_(*terms), norm.sum)
        norm.sum = count
    expected, found = losses_and_gradients(plain), losses_and_gradients(fused)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    layers = MODELS["llama"].layers
    # Recomputed layers do not see the next layer's norm.
    assert len(sums) == (2 * layers if recompute == "full" else 2 * layers - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "moe", "grouped", "deepseek"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_graph_is_made_after_the_first_step_and_validation(name, recompute, world) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    chunk, _ = drawn(MODELS[name], torch.float32, recompute=recompute)
    fuse_blocks_([chunk], counter)
    losses_and_gradients(chunk)
    with torch.no_grad():
        chunk(*(tokens_of(4, 16, 60)[0],) * 2, None)
    made = counter.frame_count
    assert made > 0
    for _ in range(4):  # other tokens, so that the experts' counts change
        losses_and_gradients(chunk)
        with torch.no_grad():
            chunk(*(tokens_of(4, 16, 60)[0],) * 2, None)
    assert counter.frame_count == made


def test_experts_with_few_tokens_make_no_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    fused = Fused(counter)
    swiglu = ACTIVATIONS["swiglu"]
    experts, grouped = (fused.compiled(f, dynamic=True) for f in (swiglu.block, swiglu.scaled))
    scale = torch.rand(9)
    for count in (5, 0, 1, 2, 9, 3):
        wide = torch.randn(count, 12)
        assert torch.equal(experts(wide), swiglu.block(wide))
        torch.testing.assert_close(grouped(wide, scale[:count]), swiglu.scaled(wide, scale[:count]))
    assert counter.frame_count == 2
    few = some_tokens(lambda tokens: tokens + 1, lambda tokens: tokens)
    assert few(torch.zeros(1)).item() == 0 and few(torch.zeros(2)).sum().item() == 2


def test_a_machine_without_a_compiler_is_refused(minimal, monkeypatch) -> None:
    config = load_config(minimal, ["train.compile=inductor"])
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nonexistent/compiler",))
    with pytest.raises(ConfigError, match=r"requires a C\+\+ compiler .* set train.compile=null"):
        check_backends(config, torch.device("cpu"))
    check_backends(load_config(minimal, ["train.compile=aot_eager"]), torch.device("cpu"))
    fused = ["train.compile=inductor", "model.attention_backend=transformer_engine"]
    with pytest.raises(InvalidConfigError, match="train.compile = .* requires"):
        load_config(minimal, fused)
