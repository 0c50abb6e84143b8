"""Stacks of units with rates of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from parallel.optimizer.exchange import UnitTransfer
from parallel.optimizer.owned_stacks import (
    OwnedStack,
    UnitRates,
    owned_stacks,
    rates_at,
)
from spectral.kernels import dispatch
from spectral.polar import workspace
from spectral.stepping import Units, batches
from tests.paths import ROOT
from training.build import config_assignments, config_units
from training.config import load_config

CPU = torch.device("cpu")
VOCABULARY = "model.vocab_size=256"
RATED = [f"optimizer.roles.{role}.lr={rate}" for role, rate in (("q", 0.1), ("up", 0.2))]


def stacks(name: str, *overrides: str) -> list[OwnedStack]:
    """The stacks of an owner that has every matrix of a recipe."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    assign = config_assignments(config)
    owned = [unit for unit in config_units(config) if assign(unit).has_owner]
    return owned_stacks(
        [UnitTransfer(unit.name, 0, (), (), unit, (0,)) for unit in owned], assign, CPU
    )


@pytest.mark.parametrize("name", ["llama1b_muon_pc", "llama1b_sso"])
def test_rates_do_not_multiply_the_stacks(name: str) -> None:
    plain, rated = stacks(name), stacks(name, *RATED)
    assert len(rated) == len(plain) <= 4
    assert [[u.name for u in each.units] for each in rated] == [
        [u.name for u in each.units] for each in plain
    ]
    assert all(isinstance(each.rates.lr, float) for each in plain)
    assert any(isinstance(each.rates.lr, torch.Tensor) for each in rated)


@pytest.fixture
def listed_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The meta device in the kernels' table; it takes as many elements at a time as a GPU."""
    path = tmp_path / "table.json"
    path.write_text('{"devices": {"meta": {"measured": null, "entries": []}}}')
    monkeypatch.setattr(dispatch, "TABLE", path)
    dispatch.forget()
    yield torch.device("meta")
    dispatch.forget()


def on(stack: OwnedStack, device: torch.device) -> Units:
    """The units of a stack on a device."""

    def never(*arguments: object) -> NoReturn:
        raise NotImplementedError

    count = len(stack.units)
    return Units(stack.units[0].shape, torch.float32, device, count, never, never)


def planned(found: list[OwnedStack], device: torch.device) -> list[list[tuple[int, slice]]]:
    """What is stepped in one call each."""
    return batches(found[0].rule, [on(stack, device) for stack in found])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_units_are_joined_and_cut_up_to_the_workspace(
    listed_meta: torch.device, device: str
) -> None:
    found, place = stacks("llama1b_sso"), torch.device(device)
    lists = planned(found, place)
    seen: dict[int, int] = {}
    for each in lists:
        counts = [part.stop - part.start for _, part in each]
        sizes = [n * found[i].units[0].numel for n, (i, _) in zip(counts, each, strict=True)]
        assert sum(sizes) <= workspace(place) or counts == [1]
        for i, part in each:
            assert part.start == seen.get(i, 0)  # in turn, without gaps
            seen[i] = part.stop
    assert seen == {i: len(stack.units) for i, stack in enumerate(found)}


def test_equal_rates_are_computed_once() -> None:
    factor = torch.tensor(0.5)
    rates = rates_at(stacks("tiny_sso", VOCABULARY), factor)
    assert len(rates) > 1 and len({id(lr) for lr, _ in rates}) == 1
    other = rates_at(stacks("tiny_sso", VOCABULARY, *RATED), factor)
    assert len({id(lr) for lr, _ in other}) > 1


def test_every_unit_has_the_rate_that_it_is_assigned() -> None:
    for stack in stacks("llama1b_muon", *RATED):
        rates = torch.as_tensor(stack.rates.lr, dtype=torch.float64).expand(len(stack.units))
        assert rates.tolist() == [assigned.lr for assigned in stack.assigned]


@pytest.mark.parametrize("factor", [0.37, torch.tensor(0.37), torch.tensor(0.37).double()])
def test_a_rate_does_not_depend_on_the_units_beside_it(factor: float | torch.Tensor) -> None:
    """Bit for bit, or the result of a step would depend on who owns which unit."""
    values = [(0.02, 0.1), (0.0074, 0.3), (1e-3 / 3, 0.0)]
    together = UnitRates.of(values, CPU).at(factor)
    for i, value in enumerate(values):
        alone = UnitRates.of([value], CPU).at(factor)
        lr, decay = (rate[i] for rate in together)
        assert alone[0] == lr
        assert alone[0] * alone[1] == lr * decay


def test_units_that_agree_have_one_number(tmp_path: Path) -> None:
    rates = UnitRates.of([(0.1, 0.0)] * 3, CPU)
    assert (rates.lr, rates.weight_decay) == (0.1, 0.0)
