"""The Gram penalty in training: its gradient, schedule, and metrics."""

from pathlib import Path
from statistics import fmean

import pytest
import torch

from models.units import Unit
from parallel.model import ParallelModel
from parallel.optimizer.routing import Penalty
from tests.matrices import penalty_by_definition
from tests.run_configs import tiny_config
from tests.run_results import json_lines
from tests.stepped_models import TINY, assign_matrices, gradient_of, stepped_model
from training.build import build_trainer
from training.data.build_data import build_data
from training.run import train

ROLES = ("v", "o", "down")


def local(model: ParallelModel, unit: Unit) -> torch.Tensor:
    """Return the whole matrix of a unit in a single-process model."""
    return unit.view(model.parameters[unit.parameter].detach()).reshape(unit.shape)


@pytest.mark.parametrize(("power", "side"), [(2, "in"), (1, "out")])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_its_gradient_is_added_once(world, power, side, name):
    penalty = Penalty(coefficient=0.3, power=power, side=side, normalize=None)
    assign = assign_matrices(name, penalised=ROLES, penalty=penalty)
    model, optimizer = stepped_model(TINY, world, assign)
    before = {}
    for unit in model.units:
        gradient_of(model, unit).copy_(torch.randn_like(gradient_of(model, unit)))
        before[unit.name] = gradient_of(model, unit).clone().reshape(unit.shape)
    optimizer.add_penalty(enabled=False, measured=True)
    figures = optimizer.add_penalty(enabled=True, measured=True)
    value, squares, loss_squares, shares = 0.0, 0.0, 0.0, []
    for unit in model.units:
        added = gradient_of(model, unit).reshape(unit.shape) - before[unit.name]
        if unit.role not in ROLES:
            assert not added.any()
            continue
        weight = local(model, unit).clone().requires_grad_()
        wanted = 0.3 * penalty_by_definition(weight, power, side)
        (gradient,) = torch.autograd.grad(wanted, weight)
        # float64; the difference of sums of order 1 leaves 1e-16.
        torch.testing.assert_close(added, gradient, rtol=1e-9, atol=1e-14)
        value += wanted.item()
        squares += gradient.square().sum().item()
        loss_squares += before[unit.name].square().sum().item()
        share = penalty_by_definition(weight, side=side, normalize="frobenius")
        shares.append(share.item())
    assert figures.value == pytest.approx(value, rel=1e-12)
    assert figures.share == pytest.approx(sum(shares) / len(shares), rel=1e-12)
    assert figures.gradient_norm == pytest.approx(squares**0.5, rel=1e-12)
    assert figures.loss_gradient_norm == pytest.approx(loss_squares**0.5, rel=1e-12)


@pytest.mark.parametrize(("rule", "precision"), [("adamw", "fp32"), ("muon", "bf16")])
def test_of_a_pc_layer_the_effective_weight_is_penalised(folder, world, rule, precision):
    keys = {"pc__level": 4, "gram_penalty__coefficient": 0.5, "train__precision": precision}
    config = tiny_config(folder, rule, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    model = trainer.model
    model.zero_gradients()
    trainer.optimizer.add_penalty(enabled=True, measured=False)
    for unit in (u for u in model.units if u.role in ROLES):
        weight = local(model, unit).clone().double().requires_grad_()
        (wanted,) = torch.autograd.grad(0.5 * penalty_by_definition(weight), weight)
        got = gradient_of(model, unit).reshape(unit.shape).double()
        # Computed in float32, through the smaller Gram matrix.
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_it_acts_within_the_horizon_and_is_reported_from_the_first_step(
    folder, world, capsys, monkeypatch
):
    config = tiny_config(
        folder, "muon", train__steps=10, log__interval=2, gram_penalty__horizon=0.5
    )
    trainer = build_trainer(config, world, *build_data(config))
    weights = [
        local(trainer.model, unit).double() for unit in trainer.model.units if unit.role in ROLES
    ]
    value = sum(1e-3 * penalty_by_definition(weight).item() for weight in weights)
    shares = [penalty_by_definition(weight, normalize="frobenius").item() for weight in weights]
    gradients: list[torch.Tensor] = []
    add = trainer.penalty.add

    def noted(index: int) -> None:
        """Record the gradients of penalised weights before and after the penalty is added."""
        for call in (lambda: None, lambda: add(index)):
            call()
            units = (unit for unit in trainer.model.units if unit.role in ROLES)
            parts = [gradient_of(trainer.model, unit).reshape(-1).double() for unit in units]
            gradients.append(torch.cat(parts))

    monkeypatch.setattr(trainer.penalty, "add", noted)
    loss = trainer.step(0).loss.item()
    before, after = gradients
    train(config, world)
    lines = json_lines(Path(config.run.dir) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 10]
    assert [line["penalty/on"] for line in lines] == [1, 1, 1, 0, 0, 0]
    assert lines[0]["penalty/value"] == pytest.approx(value, rel=1e-5)
    assert lines[0]["penalty/loss_ratio"] == pytest.approx(value / loss, rel=1e-5)
    ratio = ((after - before).norm() / before.norm()).item()
    assert lines[0]["penalty/gradient_ratio"] == pytest.approx(ratio, rel=1e-3)  # of float32 sums
    assert lines[0]["penalty/share"] == pytest.approx(fmean(shares), rel=1e-5)
    said = f"Gram penalty at the first step: {lines[0]['penalty/loss_ratio']:.3g} times the loss; "
    said += f"gradient norm: {lines[0]['penalty/gradient_ratio']:.3g} times that of the loss"
    assert said in capsys.readouterr().out
