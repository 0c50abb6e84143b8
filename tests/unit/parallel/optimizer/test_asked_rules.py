"""Routing, plans, costs and stacks of every rule, and one that the framework does not know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.size import all_units
from models.units import Unit
from parallel.comm.groups import Groups
from parallel.model import ModelOptions, build_model
from parallel.optimizer.build import build_optimizer
from parallel.optimizer.exchange import UnitTransfer
from parallel.optimizer.owned_stacks import owned_stacks
from parallel.optimizer.routing import Assign, Assignment, route
from parallel.plan.planner import plan_stage
from parallel.plan.step_shape import PlanInputs
from spectral import SpectralOptimizer
from spectral.options import DEFAULTS
from spectral.rules import RULES, AdamWRule, Rule, State
from spectral.rules.base import Report, Stack, decay_, subtract_
from tests.update_cases import fill
from training.config import group_of

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)
CPU = torch.device("cpu")


def assign_to(rule: Rule) -> Assign:
    """Matrices to `rule`, the rest to AdamW."""

    def assign(unit: Unit) -> Assignment:
        mine = rule if group_of(unit.role) == "matrix" else AdamWRule()
        return Assignment(group_of(unit.role), "under test", mine, 0.01, 0.1)

    return assign


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_routed_planned_priced_and_stacked(name: str) -> None:
    rule = RULES[name]()
    units, assign = all_units(TINY), assign_to(rule)
    rows = {row.unit: row for row in route(units, assign)}
    assert rows.keys() == {unit.name for unit in units}
    gate = rows["layers.0.gate"]
    assert (gate.radius, gate.scale) == (rule.radius_of((48, 32)), rule.scale_of((48, 32)))
    assert rows["embedding"].radius is None and rows["embedding"].scale is None
    planned = plan_stage([units], assign, PlanInputs(data=2, dtype=torch.float32))
    assert planned.units == (2 * (4 + 2 + 2 + 1 + 3) if rule.whole_matrix else 0)
    matrices = [unit for unit in units if group_of(unit.role) == "matrix"]
    costs = [assign(unit).cost(unit.shape) for unit in matrices]
    assert min(costs) > 0
    if rule.whole_matrix:
        assert planned.load_max + planned.load_mean > 0
    transfers = [UnitTransfer(unit.name, 0, (), (), unit, (0,)) for unit in matrices]
    stacks = owned_stacks(transfers, assign, CPU)
    assert sorted(len(stack.units) for stack in stacks) == [2, 2, 2 * 2, 2 * (4 + 2 + 2)]


@dataclass(frozen=True, kw_only=True)
class HeavyBall(Rule):
    """Elementwise descent with momentum, which overwrites what it is given."""

    whole_matrix: ClassVar[bool] = False
    elementwise_state: ClassVar[tuple[str, ...]] = ("mean",)

    def init_state(self, weight: Tensor) -> State:
        return {"mean": torch.zeros_like(weight)}

    def accumulate(
        self, grads: Sequence[Tensor], states: Sequence[State], active: Tensor | None
    ) -> list[Tensor]:
        for grad, state in zip(grads, states, strict=True):
            grad.add_(state["mean"], alpha=0.9)
            state["mean"].copy_(grad)
        return list(grads)

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        for weight, momentum, _, (lr, weight_decay, active) in stacks:
            decay_(weight, lr, weight_decay, active)
            subtract_(weight, momentum, lr, active)
        return [{} for _ in stacks]


def test_an_elementwise_rule_accumulates_in_library_and_framework(
    world: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both equal `torch.optim.SGD`, and the library leaves gradients as they are."""
    options = ModelOptions(seed=3, sequence_length=8, elementwise=lambda unit: True)
    model = build_model(TINY, world, options)
    optimizer = build_optimizer(
        model, lambda unit: Assignment("all", "heavy_ball", HeavyBall(), 0.01, 0.0)
    )
    (part,) = model.domains
    theirs = [torch.nn.Parameter(master.detach().clone()) for master in part.buffers.masters]
    mine = [torch.nn.Parameter(each.detach().clone()) for each in theirs]
    reference = torch.optim.SGD(theirs, lr=0.01, momentum=0.9)
    monkeypatch.setitem(RULES, "heavy_ball", HeavyBall)
    monkeypatch.setitem(DEFAULTS, "heavy_ball", {"lr": 0.01})
    library = SpectralOptimizer(mine, lr=0.01, weight_decay=0.0, rule="heavy_ball")
    for step in range(3):
        fill(model, step)
        for own, other, flat in zip(mine, theirs, part.buffers.gradients, strict=True):
            own.grad, other.grad = flat.clone(), flat.clone()
        optimizer.step(1.0, torch.tensor(True))
        library.step()
        reference.step()
        for own, other in zip(mine, theirs, strict=True):
            assert own.grad is not None and other.grad is not None
            assert torch.equal(own.grad, other.grad)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
    assert optimizer.regions
    for region in optimizer.regions:  # all but the padding of buckets
        stepped, expected = region.of(part.buffers.masters), region.of(theirs)
        torch.testing.assert_close(stepped, expected.detach(), rtol=1e-6, atol=1e-7)
