"""examples/adapters: the optimizers in other training frameworks."""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.commands import output_of, torchrun
from tests.paths import ROOT

WIDTH, HEAD, INNER = 16, 4, 12


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch):
    """A function that imports an adapter, with the library under the wheel's name."""
    monkeypatch.setitem(sys.modules, "spectrain", importlib.import_module("spectral"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "adapters"))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


class Chunk(nn.Module):
    """A layer with Megatron's names and shapes, with four query heads and two key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(kv_channels=HEAD, gated_linear_unit=True)
        self.config.qk_head_dim, self.config.qk_pos_emb_head_dim = 5, 3
        self.config.v_head_dim, self.config.kv_lora_rank = 6, 7
        self.linear_qkv = nn.Linear(WIDTH, 8 * HEAD, bias=False)
        self.linear_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear_fc1 = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.linear_q_up_proj = nn.Linear(WIDTH, 2 * (5 + 3), bias=False)
        self.linear_kv_up_proj = nn.Linear(WIDTH, 2 * (5 + 6), bias=False)
        self.linear_kv_down_proj = nn.Linear(WIDTH, 7 + 3, bias=False)

    def loss(self) -> torch.Tensor:
        """Return a loss whose gradient reaches all weights."""
        x = torch.randn(32, WIDTH)
        return sum(layer(x).square().mean() for layer in self.children())  # type: ignore[return-value]


def test_megatrons_weights_are_stepped_matrix_by_matrix(adapter) -> None:
    """Every head, every part of a latent, and each half of the gated layer ends on its own
    sphere."""
    megatron = adapter("megatron_registry")
    torch.manual_seed(0)
    chunk = Chunk()
    group = {"params": list(chunk.parameters()), "wd_mult": 1.0, "is_expert_parallel": False}
    optimizer = megatron.build(
        megatron.KINDS["sso"], [group], model_chunks=[chunk], lr=1e-3, weight_decay=0.0
    )
    for _ in range(10):
        chunk.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer, rows in (
        (chunk.linear_qkv, [HEAD]),
        (chunk.linear_fc1, [INNER]),
        (chunk.linear_q_up_proj, [5 + 3]),
        (chunk.linear_kv_up_proj, [5, 6]),
        (chunk.linear_kv_down_proj, [7, 3]),
    ):
        weight = layer.weight.detach()
        for matrix in weight.split(rows * (len(weight) // sum(rows))):
            norm = torch.linalg.matrix_norm(matrix, 2).item()
            # A step of 1e-3 may raise another singular value by as much.
            assert norm == pytest.approx((len(matrix) / WIDTH) ** 0.5, rel=3e-3)


@pytest.mark.parametrize("name", ["mlp.experts.linear_fc1.weight", "mlp.in_proj.weight"])
def test_megatrons_weights_that_are_not_divided_are_refused(adapter, name: str) -> None:
    megatron, chunk = adapter("megatron_registry"), Chunk()
    experts = nn.ModuleDict({"linear_fc1": nn.Linear(WIDTH, INNER)})
    chunk.mlp = nn.ModuleDict({"experts": experts, "in_proj": nn.Linear(WIDTH, INNER)})
    groups = [{"params": [chunk.get_parameter(name)]}]
    with pytest.raises(ValueError, match=f"not supported, got {name}"):
        megatron.build(
            megatron.KINDS["sso"], groups, model_chunks=[chunk], lr=1e-3, weight_decay=0.0
        )


def test_under_tensor_parallelism_idle_weights_stay_and_experts_are_refused(adapter, world) -> None:
    megatron = adapter("megatron_registry")
    chunk, ranks = Chunk(), (world.data.group, world.tensor.group)
    own = {"model_chunks": [chunk], "lr": 1e-3, "weight_decay": 0.0, "groups_of_ranks": ranks}
    group = {"params": [chunk.linear_qkv.weight, chunk.linear_fc1.weight]}
    optimizer = megatron.build(megatron.KINDS["sso"], [group], **own)
    before = chunk.linear_fc1.weight.clone()
    chunk.linear_qkv.weight.square().sum().backward()
    optimizer.step()
    assert torch.equal(chunk.linear_fc1.weight, before)
    chunk.linear_fc1.weight.allreduce = False  # Megatron's mark of routed experts
    with pytest.raises(ValueError, match="routed experts"):
        megatron.build(megatron.KINDS["sso"], [group], **own)


def test_megatrons_registry_builds_what_is_registered(adapter, monkeypatch) -> None:
    """The arguments, and the call that creates the state, are as in megatron-core 0.19.2."""
    registry = SimpleNamespace(_EMERGING_OPTIMIZERS={}, EmergingOptimizerEntry=SimpleNamespace)
    monkeypatch.setattr("megatron.core.optimizer.emerging_optimizers", registry, raising=False)
    megatron = adapter("megatron_registry")
    megatron.register()
    chunk, config = Chunk(), SimpleNamespace(lr=1e-3, weight_decay=0.0)
    for name, kind in megatron.KINDS.items():
        entry = registry._EMERGING_OPTIMIZERS[name]
        optimizer = entry.optimizer_cls(
            [{"params": list(chunk.parameters())}], **entry.config_to_kwargs(config, [chunk], None)
        )
        entry.init_state_fn(optimizer, config)
        assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.slow
def test_torchtitans_trainer_takes_ten_steps_on_two_ranks(tmp_path) -> None:
    """The test needs torchtitan 0.3 and triton: `pip install torchtitan triton`."""
    for name in ("torchtitan", "triton"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    script = [str(ROOT / "tests" / "torchtitan_trainer.py"), str(tmp_path)]
    launch = [sys.executable, *torchrun(2), *script]
    printed = output_of(*launch, variables=os.environ | {"PYTHONPATH": str(ROOT)})
    assert printed.count("10 steps") == 2
