"""Compiled norms, rotary positions and activations: the same mathematics, fewer kernels, and no
graph compiled twice."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from models.blocks import compiled
from models.blocks.activation import ACTIVATIONS
from models.blocks.compiled import Fused, compile_blocks_, missing_compiler, some_tokens
from models.blocks.norm import rms_norm, zero_centered_rms_norm
from models.blocks.rotary import rotate_halves
from models.config import ModelConfig
from models.initialize import initialize_
from models.size import all_units
from parallel.comm.groups import Groups
from tests.families import MIXTURE, SETTINGS, tiny_model
from tests.models import built, tokens_of
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training import build
from training.build import check_backend, compile_backend, described_backend
from training.config import InvalidConfigError, load_config
from training.errors import ConfigError

# torch.compile asks every input for its gradient, also those that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

MODELS = {
    **{name: tiny_model(name) for name in SETTINGS},
    "gpt with geglu": tiny_model("gpt", activation="geglu"),
    "grouped": tiny_model("moe", moe={**MIXTURE, "backend": "grouped"}),
}


@pytest.fixture(autouse=True)
def _no_graphs_before() -> Iterator[None]:
    """Begin and end a test without graphs, which the process keeps per function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def new_chunk(model: ModelConfig, dtype: torch.dtype, recompute: str = "none") -> torch.nn.Module:
    """The whole model, initialised."""
    chunk, parameters = built(model, dtype, recompute=recompute)
    initialize_(parameters, all_units(model), model.init, seed=3, layers=2)
    return chunk


def losses_and_gradients(chunk: torch.nn.Module, batch: int = 4) -> list[Tensor]:
    """Token losses and the gradient of every parameter."""
    chunk.zero_grad()
    tokens, labels = tokens_of(batch, 16, 60)
    losses = chunk(tokens, torch.zeros_like(tokens), None, labels=labels)
    losses.mean().backward()
    return [losses.detach(), *(p.grad.clone() for p in chunk.parameters())]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("llama", "grouped") else [pytest.mark.slow])
        for n in MODELS
    ],
)
def test_compiled_graphs_compute_what_single_operations_do(name: str, world: Groups) -> None:
    dtype = torch.float32 if name == "grouped" else torch.float64
    plain, fused = (new_chunk(MODELS[name], dtype) for _ in range(2))
    modules = compile_blocks_([fused], "aot_eager")
    assert modules >= 2 * 4 + 1  # two norms, attention and feed-forward of each layer, final norm
    expected, found = losses_and_gradients(plain), losses_and_gradients(fused)
    # Other orders of the same operations, a few roundings of the type.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "moe", "grouped", "deepseek"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_graph_is_made_after_the_first_step_and_validation(
    name: str, recompute: str, world: Groups
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    chunk = new_chunk(MODELS[name], torch.float32, recompute)
    compile_blocks_([chunk], counter)
    losses_and_gradients(chunk)
    with torch.no_grad():
        chunk(*(tokens_of(4, 16, 60)[0],) * 2, None)
    made = counter.frame_count
    assert made > 0
    for _ in range(4):  # other tokens, so that experts get other numbers of them
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


def test_too_many_graphs_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "GRAPHS", 2)
    swiglu = Fused("aot_eager").compiled(ACTIVATIONS["swiglu"].block)
    for width in (4, 6):
        swiglu(torch.randn(3, width))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        swiglu(torch.randn(3, 8))


class Operations(TorchDispatchMode):
    """Counts the operations that compute something: each is one kernel or several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


ANGLES = torch.linspace(0, 3, 6)[:, None, None, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
HEADS = torch.randn(6, 2, 3, 4, generator=torch.Generator().manual_seed(5))
# Kernels of forward and backward at most; turning two tensors takes one each, a norm's gain gets
# its gradient by a reduction of its own.
PLACES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], torch.dtype, int]] = {
    "norm": (rms_norm, (HEADS, torch.ones(4), 1e-5), torch.float32, 3),
    "centered": (zero_centered_rms_norm, (HEADS, torch.zeros(4), 1e-5), torch.bfloat16, 3),
    "halves": (rotate_halves, (HEADS, HEADS[:, :, :1], ANGLES), torch.bfloat16, 4),
}


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
@pytest.mark.parametrize("place", PLACES)
def test_inductor_makes_fewer_kernels_of_the_same_function(place: str) -> None:
    function, arguments, dtype, kernels = PLACES[place]
    arguments = tuple(
        a.to(dtype) if isinstance(a, Tensor) and a is not ANGLES else a for a in arguments
    )

    def results(f: Callable[..., Any]) -> list[Tensor]:
        leaves = [
            a.clone().requires_grad_(a is not ANGLES) if isinstance(a, Tensor) else a
            for a in arguments
        ]
        out = f(*leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        sum((o.float() * o.float().detach().cos()).sum() for o in outputs).backward()
        return [*outputs, *(a.grad for a in leaves if isinstance(a, Tensor) and a.requires_grad)]

    with Operations() as separate:
        expected = results(function)
    fused = torch.compile(function, fullgraph=True, dynamic=False)
    found, codes = run_and_get_code(results, fused)
    # bfloat16 operations round each result; the fused kernel rounds once.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    made = sum(len(re.findall(r"\n +cpp_fused\w*\(", code)) for code in codes)
    assert 2 <= made <= kernels < separate.count / 2


def test_a_machine_without_a_compiler_is_refused(
    minimal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(minimal, ["train.compile=inductor"])
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nonexistent/compiler",))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler .* set train.compile=null"):
        check_backend(config)
    check_backend(load_config(minimal, ["train.compile=aot_eager"]))
    with pytest.raises(InvalidConfigError) as caught:
        load_config(
            minimal, ["train.compile=inductor", "model.attention_backend=transformer_engine"]
        )
    assert "train.compile needs model.attention_backend sdpa" in str(caught.value.problems)


def test_auto_compiles_on_gpus_and_says_what_it_lacks(
    minimal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, te = (
        load_config(minimal, [f"model.attention_backend={name}"])
        for name in ("sdpa", "transformer_engine")
    )
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(build, "missing_compiler", lambda device: None)
    assert compile_backend(config, gpu) == described_backend(config, gpu) == "inductor"
    assert compile_backend(config, cpu) is None and described_backend(config, cpu) == "none"
    assert described_backend(te, gpu) == "none, transformer_engine fuses them"
    monkeypatch.setattr(build, "missing_compiler", lambda device: "Triton")
    assert compile_backend(config, gpu) is None
    assert described_backend(config, gpu) == "none, inductor needs Triton"


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_compiled_runs_have_the_losses_of_plain_ones(world: Groups, tmp_path: Path) -> None:
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    losses: dict[str, list[float]] = {}
    for backend in ("null", "inductor"):
        config = tiny_config(str(tmp_path), "adamw", train__compile=backend)
        trainer = build.build_trainer(config, world, *build.build_data(config))
        losses[backend] = [trainer.step(i).loss.item() for i in range(20)]
    # float32 in another order.
    assert losses["inductor"] == pytest.approx(losses["null"], rel=1e-5)
