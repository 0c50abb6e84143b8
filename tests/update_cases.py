"""Tiny models under every rule, with and without PC layers, whose updates can be captured in a
graph."""

from typing import Any

import torch

from models.config import ModelConfig
from models.pc_config import PCConfig
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.optimizer.distributed_optimizer import CapturedUpdate, Update
from spectral import AdamW, Muon, MuonPlusPlus, MuonSphere, SpectralOptimizer, SpectralSphere
from spectral.rules import RULES
from tests.stepped_models import assigned, stepped_model
from training.config.optimizer_section import GroupConfig, OptimizerConfig, RulesConfig

TINY = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, vocab_size=30)
ADAMW = GroupConfig(rule="adamw", lr=0.02)
# Few iterations, because every operation is compared.
SHORT: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"steps": 2},
    "muon_sphere": {"steps": 2, "krylov_steps": 2},
    # early_exit as on a GPU; on a CPU, the solver would decide on the host whether to stop.
    "spectral_sphere": {"steps": 2, "krylov_steps": 2, "early_exit": False},
    "muon_plus_plus": {"steps": 2, "krylov_steps": 2},
}
PC = {
    "none": None,
    "materialized": PCConfig(level=4),
    "in_graph": PCConfig(level=4, evaluator="in_graph"),
}
KINDS = [*((rule, pc) for rule in SHORT for pc in ("none", "materialized")), ("muon", "in_graph")]


def built(
    world: Groups, rule: str, pc: str, *, recorded: bool = True
) -> tuple[ParallelModel, Update]:
    """Return a tiny model and its update. The model is in bfloat16, so that the master weights are
    separate copies."""
    group = GroupConfig(rule=rule, lr=0.02, weight_decay=0.1)
    rules = RulesConfig(**{name: RULES[name](**each) for name, each in SHORT.items()})
    config = OptimizerConfig(matrix=group, embedding=ADAMW, head=ADAMW, scalar=ADAMW, rules=rules)
    model, optimizer = stepped_model(
        TINY,
        world,
        assigned(config, TINY, PC[pc]),
        apart=True,
        optimizer={"overlap_gather": False, "step_groups": 2},
        dtype=torch.bfloat16,
        pc=PC[pc],
    )
    return model, (CapturedUpdate if recorded else Update)(optimizer, max_norm=1.0)


OPTIMIZERS = (AdamW, Muon, MuonSphere, SpectralSphere, MuonPlusPlus)
"""The library's optimizers, for the CUDA graph tests."""


def library_optimizer(
    kind: type[SpectralOptimizer], device: str = "cpu", **fields: Any
) -> SpectralOptimizer:
    """Return an optimizer for three matrices, two of which have the same shape, and a vector, all
    with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(8, 12), (8, 12), (12, 8), (8,)]
    parameters = [
        torch.nn.Parameter(torch.randn(shape, device=device, generator=generator))
        for shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "rule": "adamw"}]
    options = {"lr": torch.tensor(0.01, device=device), "nonfinite": "skip"}
    return kind(groups, **SHORT[kind.default_rule] | options | fields)


def fill(model: ParallelModel, turn: int) -> None:
    """Fill the gradients of a step with random values."""
    generator = torch.Generator().manual_seed(turn)
    for part in model.domains:
        for flat in part.gradients:
            flat.copy_(torch.randn(flat.shape, generator=generator))
