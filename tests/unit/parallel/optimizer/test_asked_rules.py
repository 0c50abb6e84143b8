"""Routing, plans, costs and stacks for every rule."""

import pytest
import torch

from models.families import all_units
from parallel.optimizer.owned_stacks import owned_stacks
from parallel.optimizer.routing import route
from parallel.optimizer.unit_transfer import UnitTransfer
from parallel.plan.planner import plan_stage
from parallel.plan.step_shape import PlanInputs
from spectral.rules import RULES
from tests.stepped_models import TINY, assign_to
from training.config import group_of


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_routed_planned_priced_and_stacked(name: str) -> None:
    rule = RULES[name]()
    units, assign = all_units(TINY), assign_to(rule)
    rows = {unit.name: route(unit, assign(unit), {}) for unit in units}
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
    stacks = owned_stacks(transfers, assign)
    assert sorted(len(stack.units) for stack in stacks) == [2, 2, 2 * 2, 2 * (4 + 2 + 2)]
