"""Stacks of units with the same shape, rule and learning rates."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from parallel.optimizer.owned_stacks import OwnedStack, owned_stacks
from parallel.optimizer.unit_transfer import UnitTransfer
from spectral.kernels import dispatch
from spectral.polar import workspace
from spectral.stepping import Units, batches
from tests.paths import ROOT
from training.assignments import config_assignments, config_units
from training.config import load_config

APART = [f"optimizer.roles.{role}.lr={rate}" for role, rate in (("q", 0.1), ("up", 0.2))]
LATE = "pc.overrides.late={layers: [8, 15], level: 1}"


def stacks(name: str, *overrides: str) -> list[OwnedStack]:
    """Return the stacks of a rank that owns all matrices of a recipe."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    assign = config_assignments(config)
    owned = [unit for unit in config_units(config) if assign(unit).has_owner]
    found = owned_stacks([UnitTransfer(unit.name, 0, (), (), unit, (0,)) for unit in owned], assign)
    for stack in found:
        assert all(replace(assign(u), penalty=None) == stack.assigned for u in stack.units)
    return found


@pytest.mark.parametrize(
    ("name", "more", "maps"), [("llama1b_muon_pc", [LATE], 2), ("llama1b_sso", [], 0)]
)
def test_units_of_a_stack_are_assigned_the_same(name: str, more: list[str], maps: int) -> None:
    """Units with other rates or another PC map have a stack of their own."""
    assert len(stacks(name)) <= 4
    found = [(role, each.assigned) for each in stacks(name, *APART, *more) for role in roles(each)]
    rates = {(role, assigned.lr) for role, assigned in found}
    assert {("q", 0.1), ("up", 0.2)} < rates and len(rates) == len(dict(rates))
    assert len({assigned.pc for _, assigned in found} - {None}) == maps


def roles(stack: OwnedStack) -> set[str]:
    """Return the roles of the units in a stack."""
    return {unit.role for unit in stack.units}


ZEROS: dict[str, Callable[[Any], float]] = {
    "optimizer.roles.down.lr": lambda assigned: assigned.lr,
    "optimizer.roles.down.weight_decay": lambda assigned: assigned.weight_decay,
    "pc.gamma_lr": lambda assigned: assigned.pc.gamma_lr,
    "pc.gamma_weight_decay": lambda assigned: assigned.pc.gamma_weight_decay,
}


@pytest.mark.parametrize("key", ZEROS)
def test_a_rate_of_0_is_not_a_null(key: str) -> None:
    def rate(*overrides: str) -> float:
        (found,) = stacks("llama1b_muon_pc", "model.layers=1", "pc.blocks=[down]", *overrides)[-1:]
        assert roles(found) == {"down"}
        return ZEROS[key](found.assigned)

    assert rate() > 0 == rate(f"{key}=0")


@pytest.fixture
def listed_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The meta device, added to the kernel table so that it has the workspace of a GPU."""
    path = tmp_path / "table.json"
    path.write_text('{"devices": {"meta": {"measured": null, "entries": []}}}')
    monkeypatch.setattr(dispatch, "TABLE", path)
    dispatch.forget()
    yield torch.device("meta")
    dispatch.forget()


class Planned(Units):
    """Units that are only planned, never stepped."""

    def take(self, part: slice) -> NoReturn:
        raise NotImplementedError

    def put(self, part: slice, stack: object, report: object) -> NoReturn:
        raise NotImplementedError


def planned(found: list[OwnedStack], device: torch.device) -> list[list[tuple[int, slice]]]:
    """Return the batches of units for each call of the rule."""
    shapes = [(stack.units[0].shape, len(stack.units)) for stack in found]
    return batches(found[0].rule, [Planned(s, torch.float32, device, n) for s, n in shapes])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_units_are_joined_and_cut_up_to_the_workspace(listed_meta, device) -> None:
    found, place = stacks("llama1b_sso"), torch.device(device)
    lists = planned(found, place)
    seen: dict[int, int] = {}
    for each in lists:
        counts = [part.stop - part.start for _, part in each]
        sizes = [n * found[i].units[0].numel for n, (i, _) in zip(counts, each, strict=True)]
        assert sum(sizes) <= workspace(place) or counts == [1]
        for i, part in each:
            assert part.start == seen.get(i, 0)  # in order, without gaps
            seen[i] = part.stop
    assert seen == {i: len(stack.units) for i, stack in enumerate(found)}
