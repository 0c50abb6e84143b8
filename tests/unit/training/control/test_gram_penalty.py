"""The Gram penalty in training: its gradient, when it acts, what is logged, and a resumed run."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from models.units import Unit
from parallel.model import ParallelModel
from parallel.optimizer.build import build_optimizer
from parallel.optimizer.routing import Assignment, Penalty
from spectral.rules import RULES
from tests.run_configs import read_config, tiny_config
from tests.token_files import write_token_set
from training.build import build_data, build_trainer
from training.config import Config, InvalidConfigError, group_of
from training.config.sections.gram_penalty import AdaptiveConfig
from training.control.penalty_triggers import GramGrowth, TopShareRise, switch
from training.evaluate import as_batch
from training.loop import Trainer, mean_loss
from training.run import train
from training.run_log import EVENTS_FILE

ROLES = ("v", "o", "down")
BY_TOP_SHARE = {
    "gram_penalty__schedule": "adaptive",
    "gram_penalty__adaptive__measure": "top_share",
}
EXPERTS = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a token set."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


def penalty_of(weight: torch.Tensor, power: int, side: str) -> torch.Tensor:
    """The penalty of one matrix, from its definition."""
    gram = weight.T @ weight if side == "in" else weight @ weight.T
    energy = (gram - torch.diag(torch.diag(gram))).square().sum()
    return energy if power == 2 else energy.sqrt()


def local(model: ParallelModel, unit: Unit) -> torch.Tensor:
    """The whole matrix of a unit of a one-process model."""
    return unit.view(model.parameters[unit.parameter].detach()).reshape(unit.shape)


@pytest.mark.parametrize(("power", "side"), [(2, "in"), (1, "out")])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_its_gradient_is_added_once(one_process_model, power, side, name):
    rule = RULES[name]()
    model, _ = one_process_model(rule)
    penalty = Penalty(coefficient=0.3, power=power, side=side, normalize=None)

    def assign(unit: Unit) -> Assignment:
        mine = rule if group_of(unit.role) == "matrix" else RULES["adamw"]()
        added = penalty if unit.role in ROLES else None
        return Assignment(group_of(unit.role), name, mine, 0.01, 0.0, penalty=added)

    optimizer = build_optimizer(model, assign)
    before = {}
    for unit in model.units:
        model.gradient(unit).copy_(torch.randn_like(model.gradient(unit)))
        before[unit.name] = model.gradient(unit).clone().reshape(unit.shape)
    optimizer.add_penalty(acts=False, measured=True)
    figures = optimizer.add_penalty(acts=True, measured=True)
    value, squares, loss_squares = 0.0, 0.0, 0.0
    for unit in model.units:
        added = model.gradient(unit).reshape(unit.shape) - before[unit.name]
        if unit.role not in ROLES:
            assert not added.any()
            continue
        weight = local(model, unit).clone().requires_grad_()
        wanted = 0.3 * penalty_of(weight, power, side)
        (gradient,) = torch.autograd.grad(wanted, weight)
        # float64; the difference of sums of order 1 leaves 1e-16.
        torch.testing.assert_close(added, gradient, rtol=1e-9, atol=1e-14)
        value += wanted.item()
        squares += gradient.square().sum().item()
        loss_squares += before[unit.name].square().sum().item()
    assert figures.value == pytest.approx(value, rel=1e-12)
    assert figures.gradient_norm == pytest.approx(squares**0.5, rel=1e-12)
    assert figures.loss_gradient_norm == pytest.approx(loss_squares**0.5, rel=1e-12)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_of_a_pc_layer_the_effective_weight_is_penalised(folder, world, rule):
    config = tiny_config(folder, rule, pc__level=4, gram_penalty__coefficient=0.5)
    trainer = build_trainer(config, world, *build_data(config))
    model = trainer.model
    model.zero_gradients()
    trainer.optimizer.add_penalty(acts=True, measured=False)
    for unit in (u for u in model.units if u.role in ROLES):
        weight = local(model, unit).clone().double().requires_grad_()
        (wanted,) = torch.autograd.grad(0.5 * penalty_of(weight, 2, "in"), weight)
        got = model.gradient(unit).reshape(unit.shape).double()
        # Computed in float32, through the smaller Gram matrix.
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def metrics_of(config: Config) -> list[dict]:
    """The lines that a run has logged."""
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_it_acts_within_the_horizon_and_is_reported_from_the_first_step(folder, world, capsys):
    config = tiny_config(
        folder, "muon", train__steps=10, log__interval=2, gram_penalty__horizon=0.5
    )
    trainer = build_trainer(config, world, *build_data(config))
    value = sum(
        1e-3 * penalty_of(local(trainer.model, unit).double(), 2, "in").item()
        for unit in trainer.model.units
        if unit.role in ROLES
    )
    loss = trainer.step(0).loss.item()
    train(config, world)
    lines = metrics_of(config)
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 10]
    assert [line["penalty/on"] for line in lines] == [1, 1, 1, 0, 0, 0]
    assert lines[0]["penalty/value"] == pytest.approx(value, rel=1e-5)
    assert lines[0]["penalty/loss_ratio"] == pytest.approx(value / loss, rel=1e-5)
    said = f"Gram penalty in the first step: {lines[0]['penalty/loss_ratio']:.3g} of the loss"
    assert said in capsys.readouterr().out


def test_it_lowers_the_correlation(folder, world):
    shares = {}
    for coefficient in (1e-9, 1.0):
        config = tiny_config(
            folder,
            "adamw",
            gram_penalty__horizon=1.0,
            gram_penalty__coefficient=coefficient,
            run__dir=f"{folder}/{coefficient}",
        )
        train(config, world)
        shares[coefficient] = metrics_of(config)[-1]["penalty/share"]
    assert shares[1.0] < 0.8 * shares[1e-9]


def test_the_switch_turns_on_with_growth_and_off_without():
    growth = GramGrowth(AdaptiveConfig(on_above=0.1, off_below=0.02, smoothing=0.5))
    seen = []
    for share in (1.0, 1.5, 1.55, 1.55, 1.55, 1.55, 1.0, 1.02):
        growth.measure(share)
        seen.append(growth.on)
    # Growth: 0, .20, .12, .06, .03, .015 (below .02 only now), then falling, and too little.
    assert seen == [False, True, True, True, True, False, False, False]


def test_top_share_switches_on_above_its_start_and_off_where_it_has_fallen():
    config = AdaptiveConfig(
        measure="top_share", start=2, on_above=2.0, off_below=1.5, smoothing=0.5
    )
    rise = switch(config)
    assert isinstance(rise, TopShareRise)
    seen = []
    for share in (0.05, 0.15, 0.2, 0.3, 0.3, math.nan, 0.2, 0.1, 0.1, 0.3):
        rise.measure(share)
        seen.append((rise.on, rise.level if rise.level is None else round(rise.level, 3)))
    # The start is 0.1; then means of 0.1 with what is new. One that is not finite decides nothing,
    # and between the bounds the switch stays where it is.
    assert seen == [
        (False, None), (False, None), (False, 1.5), (True, 2.25), (True, 2.625), (True, 2.625),
        (True, 2.312), (True, 1.656), (False, 1.328), (True, 2.164),
    ]  # fmt: skip


def test_next_to_nothing_is_no_start_to_rise_from():
    rise = TopShareRise(AdaptiveConfig(measure="top_share", start=1, smoothing=0.0))
    for share in (0.0, 0.015):
        rise.measure(share)
    assert rise.level == pytest.approx(1.5) and not rise.on


@pytest.mark.parametrize("measure", ["gram", "top_share"])
def test_a_switch_goes_on_from_its_state(measure):
    config = AdaptiveConfig(measure=measure, start=2, on_above=0.3, off_below=0.1)
    series = [0.1, 0.2, 0.25, 0.6, 0.1, 0.02, 0.01, 0.4, 0.5]
    for stop in range(len(series)):
        whole, before, after = switch(config), switch(config), switch(config)
        for share in series[:stop]:
            before.measure(share)
        after.restore(json.loads(json.dumps(before.state())))
        seen = []
        for i, share in enumerate(series):
            whole.measure(share)
            if i >= stop:
                after.measure(share)
                seen.append((after.on, after.level) == (whole.on, whole.level))
        assert all(seen)


def test_top_share_is_that_of_the_micro_batches_gradients(folder, world):
    """Measured in a run, beside monitors of the same step, and computed by a decomposition of the
    micro-batches' gradients as rows, of which each is the difference of two runs of backward."""
    config = tiny_config(
        folder,
        "muon",
        train__exit_step=3,
        log__interval=1,
        monitors__interval=1,
        monitors__groups="[noise]",
        gram_penalty__roles="[o,down]",
        gram_penalty__schedule="adaptive",
        gram_penalty__horizon=1,
        gram_penalty__adaptive__measure="top_share",
        gram_penalty__adaptive__interval=2,
        gram_penalty__adaptive__samples=4,
    )
    trainer = build_trainer(config, world, *build_data(config))
    wanted = by_decomposition(trainer)
    train(config, world)
    lines = metrics_of(config)
    shares = [line["penalty/top_share"] for line in lines]
    assert shares[0] == pytest.approx(wanted, rel=1e-4)  # float32 gradients
    assert shares[0] == shares[1] != shares[2]  # steps 1 and 3 are measured
    monitored = (Path(config.run.dir) / "monitors.jsonl").read_text().splitlines()
    for line in (json.loads(each) for each in monitored):
        units = [u for u in line["units"].values() if u["role"] in ("o", "down")]
        excess = [(3 * u["gradient_top_share"] - 1) / 2 for u in units]  # of four samples
        if line["step"] != 2:
            mean = sum(excess) / len(excess)
            assert shares[line["step"] - 1] == pytest.approx(mean, rel=1e-9)


def by_decomposition(trainer: Trainer) -> float:
    """The mean share of the noise in its top direction, of the o and down of the first step."""
    model = trainer.model
    units = [unit for unit in model.units if unit.role in ("o", "down")]
    windows = [next(trainer.batches) for _ in range(trainer.microbatches)]
    rows: dict[str, list[torch.Tensor]] = {unit.name: [] for unit in units}
    for window in windows:
        model.zero_gradients()
        batch = as_batch(window, trainer.groups)
        model.forward_backward(
            lambda batch=batch: iter([batch]), mean_loss, microbatches=1, micro_batch=2, train=True
        )
        for unit in units:
            rows[unit.name].append(model.gradient(unit).double().flatten().clone())
    shares = []
    for found in rows.values():
        centred = torch.stack(found) - torch.stack(found).mean(0)
        values = torch.linalg.svdvals(centred).square()
        top, count = (values[0] / values.sum()).item(), len(found)
        shares.append(((count - 1) * top - 1) / (count - 2))
    return sum(shares) / len(shares)


def test_a_switched_run_says_when(folder, world, capsys):
    config = tiny_config(folder, "adamw", **ADAPTIVE["gram"])
    train(config, world)
    switched = {
        line["step"]: line["penalty/switched"]
        for line in metrics_of(config)
        if "penalty/switched" in line
    }
    assert set(switched.values()) == {1.0, -1.0}
    events = (Path(config.run.dir) / EVENTS_FILE).read_text().splitlines()
    told = [event for event in map(json.loads, events) if " switched " in event["text"]]
    assert [event["step"] for event in told] == list(switched)
    for event, way in zip(told, switched.values(), strict=True):
        assert f"Gram penalty switched {'on' if way > 0 else 'off'} at level " in event["text"]
    on = {line["step"]: line["penalty/on"] for line in metrics_of(config)}
    for step, way in switched.items():
        assert on[step + 1] == (way > 0)  # from the next step on


ADAPTIVE = {
    measure: {
        "train__steps": 12,
        "log__interval": 1,
        "validation__interval": 0,
        "checkpoint__interval": 6,
        "gram_penalty__horizon": 1.0,
        "gram_penalty__schedule": "adaptive",
        "gram_penalty__coefficient": 0.05,
        "gram_penalty__adaptive__measure": measure,
        **{f"gram_penalty__adaptive__{key}": value for key, value in keys.items()},
    }
    for measure, keys in (
        ("gram", {"interval": 2, "on_above": 1e-3, "off_below": -1e-3}),
        ("top_share", {"interval": 1, "start": 2, "on_above": 1.6, "off_below": 1.5, "samples": 4}),
    )
}


@pytest.mark.parametrize("measure", ADAPTIVE)
def test_a_resumed_adaptive_run_is_the_one_that_did_not_stop(folder, world, measure):
    adaptive = ADAPTIVE[measure]
    whole = tiny_config(folder, "adamw", **adaptive, run__dir=f"{folder}/whole")
    train(whole, world)
    parts = read_config(folder, **adaptive, run__dir=f"{folder}/parts")
    train(read_config(folder, **adaptive, run__dir=f"{folder}/parts", train__exit_step=6), world)
    train(parts, world)
    kept = ("train/loss", "penalty/on", "penalty/level", "penalty/value", "penalty/switched")
    lines = [[line.get(key) for key in kept] for line in metrics_of(whole)]
    again = [[line.get(key) for key in kept] for line in metrics_of(parts)]
    assert again == lines
    assert {line[1] for line in lines} == {0.0, 1.0}  # it was switched
    assert {line[1] for line in lines[6:]} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"gram_penalty__roles": "[v,head]"}, "gram_penalty.roles must name one of"),
        ({"gram_penalty__horizon": 1.5}, "gram_penalty.horizon must be in (0, 1], got 1.5"),
        ({"gram_penalty__coefficient": 0}, "gram_penalty.coefficient must be above 0"),
        ({"gram_penalty__roles": "[]"}, "roles must name at least one role"),
        (
            {"gram_penalty__adaptive__off_below": 0.5},
            "adaptive.off_below must be less than on_above = 0.02, got 0.5",
        ),
        (
            {"gram_penalty__adaptive__measure": "top_share", "gram_penalty__adaptive__on_above": 1},
            "adaptive.off_below must be less than on_above = 1, got 1.5",
        ),
        ({"gram_penalty__adaptive__smoothing": 1}, "smoothing must be in [0, 1), got 1"),
        ({"gram_penalty__adaptive__samples": 2}, "adaptive.samples must be at least 3, got 2"),
        ({**BY_TOP_SHARE, "train__micro_batch": 4}, "train.global_batch must be at least 3 micro"),
        (
            {**BY_TOP_SHARE, **EXPERTS, "gram_penalty__roles": "[expert_down]"},
            "gram_penalty.roles must name a role outside the routed experts",
        ),
        (
            {"gram_penalty__power": 2, "optimizer__distributed__tensor_mode": "shardwise"},
            "tensor_mode must be owner with gram_penalty",
        ),
        (
            {"gram_penalty__power": 2, "pc__evaluator": "in_graph"},
            "pc.evaluator must be materialized where gram_penalty.roles have PC layers",
        ),
    ],
)
def test_what_cannot_be_is_refused(folder, overrides, words):
    with pytest.raises(InvalidConfigError, match=re.escape(words)):
        tiny_config(folder, **overrides)
