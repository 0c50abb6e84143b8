"""Whatever value is injected at whatever place, weights stay finite, and the event is counted and
reported."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.run_configs import RULES, tiny_config
from tests.slow_cases import slow_but
from training.build import build_trainer
from training.data.build_data import build_data
from training.loop import Loop
from training.nonfinite import NonFiniteError
from training.step import Trainer

POISONS = [float("nan"), float("inf"), 1e30]
SMALL = {
    "model__layers": 1,
    "model__hidden": 32,
    "model__ffn": 48,
    "train__precision": "bf16",
    "train__global_batch": 2,
    "train__sequence_length": 8,
    "schedule__warmup_steps": 0,
}
PC: dict[str, dict[str, Any]] = {
    "plain": {},
    "materialized": {"pc__level": 2, "pc__learnable_gamma": True},
    "in_graph": {"pc__level": 2, "pc__evaluator": "in_graph", "pc__learnable_gamma": True},
}


def places(trainer: Trainer) -> dict[str, Tensor]:
    """Return one tensor of each kind that a step reads, keyed by kind."""
    found: dict[str, Tensor] = {}
    for domain in trainer.optimizer.domains:
        for region in domain.regions:
            kind = "matrix" if region.assigned.rule.whole_matrix else "elementwise"
            if kind == "matrix":  # only the loss guards an elementwise rule's state
                found |= {f"{kind} {name}": value for name, value in region.state.items()}
            found[f"{kind} weight"] = region.of(domain.model.masters)
        for stack in domain.stacks:
            if stack.rule.whole_matrix:
                found |= {f"unit {name}": value for name, value in stack.state.items()}
        for units in domain.materialized:
            for each in units.stacks:
                found |= {"W": each.weight, "pc u": each.u, "pc v": each.v, "gamma": each.gamma}
    for effective in trainer.model.in_graph:
        u, v = effective.pair(0)
        found |= {"pc u": u, "pc v": v, "gamma": effective.gamma.data}
    return found


def weights(trainer: Trainer):
    """Yield all tensors that the optimizer updates, and the model's weights."""
    for domain in trainer.optimizer.domains:
        yield from domain.model.masters
        yield from domain.model.parameters
        for units in domain.materialized:
            for each in units.stacks:
                yield from (each.weight, each.gamma)


def memory(trainer: Trainer) -> list[Tensor]:
    """Return all tensors that are kept after a step."""
    found = list(weights(trainer))
    for domain in trainer.optimizer.domains:
        found += [value for region in domain.regions for value in region.state.values()]
        found += [value for stack in domain.stacks for value in stack.tensors()]
    for effective in trainer.model.in_graph:
        found += [*effective.pair(0), effective.gamma.data]
    return found


FAST = [("adamw", "in_graph"), ("muon_plus_plus", "plain"), ("spectral_sphere", "materialized")]


@pytest.mark.parametrize(("rule", "pc"), slow_but(FAST, product(RULES, PC)))
def test_weights_stay_finite(rule: str, pc: str, folder: str, world) -> None:
    config = tiny_config(folder, rule, **SMALL, **PC[pc])
    trainer = build_trainer(config, world, *build_data(config))
    for step in range(2):
        assert trainer.step(step).active.item()
    healthy = [tensor.clone() for tensor in memory(trainer)]
    for place, tensor in places(trainer).items():
        for poison in POISONS:
            for now, before in zip(memory(trainer), healthy, strict=True):
                now.copy_(before)
            tensor.view(-1)[-1] = poison
            finite = [each.isfinite() for each in weights(trainer)]
            before = trainer.spectral.refusals.total
            results = []
            for step in (2, 3):
                results.append(trainer.step(step))
                trainer.spectral.record(results[-1].active)
            trainer.model.wait_for_weights()
            for each, was in zip(weights(trainer), finite, strict=True):
                # A weight set to NaN is read as NaN, and no other weight.
                spread = (~each[was].isfinite()).sum()
                assert spread <= (place.endswith(("weight", "gamma"))), (place, poison)
            metrics = trainer.spectral.refusals.summary()
            refused = trainer.spectral.refusals.total - before
            # An infinite variance makes a zero step; step counts and tracked vectors are repaired
            # silently; finite values may be large.
            unseen = ("step", "u", "v", "nearby")
            unseen += ("correlation", "rescaled")  # not read by the default algorithm
            unseen += ("variance",) if poison == float("inf") else ()
            if poison != 1e30 and place.split()[-1] not in unseen:
                skipped = not all(result.active.item() for result in results)
                assert skipped or refused, (place, poison)
            assert bool(refused) == any(name.startswith("optim/refused/") for name in metrics)


@pytest.mark.parametrize("interval", [1, 5])
def test_a_unit_that_is_refused_for_long_ends_the_run(interval, folder, world) -> None:
    """Refusals are counted across reports, and each report checks the count."""
    keys = {"train__max_skipped_steps": 2, "log__interval": interval}
    config = tiny_config(folder, "muon", **SMALL, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    region = next(
        r for d in trainer.optimizer.domains for r in d.regions if r.assigned.rule.whole_matrix
    )
    region.state["momentum"].view(-1)[0] = torch.nan
    Loop(trainer).step_and_report()
    assert trainer.checkpoint()["trainer"]["spectral"]["refused"] == 1  # reported or not
    with pytest.raises(NonFiniteError, match=r"updates of layers.* were nonfinite") as caught:
        Loop(trainer).run()
    assert trainer.progress.step == {1: 3, 5: 5}[interval]
    assert caught.value.first_step == 1  # a rewind leaves out the samples of all these steps
    assert caught.value.samples == (0, trainer.progress.sample)


def test_solves_that_miss_their_tolerance_are_counted_unless_the_step_is_skipped(folder, world):
    rule = {"optimizer__rules__spectral_sphere__tolerance": 1e-9}
    config = tiny_config(folder, "spectral_sphere", **SMALL, **rule)
    trainer = build_trainer(config, world, *build_data(config))
    weight = next(iter(trainer.model.parameters.values())).data
    missed: list[int] = []
    for step, poison in enumerate((False, True, False)):
        sound = weight.clone()
        if poison:
            weight.fill_(torch.nan)
        result = trainer.step(step)
        trainer.spectral.record(result.active)
        assert result.active.item() is not poison
        if poison:
            weight.copy_(sound)
        reports = [report for _, report in trainer.optimizer.reports() if "converged" in report]
        missed.append(sum(not report["converged"] for report in reports))
    assert all(missed)
    assert trainer.spectral.state()["unconverged"] == missed[0] + missed[2]
    for _ in range(2):  # each report contains the count since the start of the run
        assert trainer.spectral.summary()["spectral/unconverged"] == missed[0] + missed[2]


@pytest.mark.parametrize("evaluator", ["materialized", "in_graph"])
def test_a_wrong_tracked_norm_is_corrected_and_counted(evaluator: str, folder, world) -> None:
    config = tiny_config(folder, "muon", **SMALL, **PC[evaluator])
    trainer = build_trainer(config, world, *build_data(config))
    if evaluator == "materialized":
        stack = trainer.optimizer.materialized[0]
        weight, u, v = stack.weight[0], stack.u[0], stack.v[0]
    else:
        layer = trainer.model.in_graph[0]
        weight, (u, v) = trainer.model.parameters[layer.units[0].parameter], layer.pair(0)
        weight = layer.matrices(weight.detach())[0].float()
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    middle = len(values) // 2
    u.copy_(left[:, middle])
    v.copy_(right[middle])
    for largest in (values[0] / values[middle], 1):
        metrics = trainer.spectral.summary()
        assert metrics["pc/domain/max"] == pytest.approx(float(largest), rel=1e-3)
        assert metrics["pc/domain/outside"] == trainer.spectral.state()["outside"] == 1
