"""Every entry of a checkpoint has an effect: if it has another value, a resumed run differs or is
rejected."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from parallel.checkpoint.safe_index import Reader
from parallel.checkpoint.state import sharded_state
from spectral import SpectralSphere
from spectral.rules.spectral_sphere import SpectralSphereRule
from tests.run_configs import MIXTURE, tiny_config
from tests.run_results import tensors_of, without_times
from tests.slow_cases import slow_but
from training.build import build_trainer, restore
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.stored_checkpoint import CheckpointInfo, ResumeError
from training.data.build_data import build_data
from training.loop import Hooks, Loop
from training.run import train

WIDE = {"model__hidden": 96, "model__ffn": 128}
"""Sizes above 64, for which the singular vectors are initialized from the last step's vectors on a
CPU as well."""
PC = {"pc__level": 4, "pc__norm_recovery": True, "gram_penalty__horizon": 1.0}
RUNS: dict[str, dict[str, Any]] = {
    "spectral_sphere": MIXTURE | WIDE | {"model__moe__expert_bias_rate": 0.01},
    "adamw": PC,
    "muon": {"pc__level": 4, "pc__norm_recovery": True, "pc__evaluator": "in_graph"},
    "muon_plus_plus": WIDE
    | {
        "optimizer__rules__muon_plus_plus__correlation_rescale": True,
        "optimizer__rules__muon_plus_plus__algorithm": "project",
    },
    "muon_sphere": WIDE,
}
STOPPED = 3
ELSEWHERE = {
    "trainer.guard.in_a_row": "a step that is taken ends it; tests/unit/training/test_survival.py",
    "optimizer/correlation": "for correlated entries; tests/unit/spectral/test_muon_plus_plus.py",
    "optimizer/rescaled": "the same",
    "progress.read": "for another mixture; tests/unit/training/data",
}
"""Maps the entries that do not affect the next steps of this run to the tests that cover them."""


@pytest.mark.parametrize("rule", slow_but(["adamw"], list(RUNS)))
def test_every_entry_changes_what_follows(rule, folder, world, monkeypatch):
    keys = {"log__interval": 1, "checkpoint__interval": STOPPED, "monitors__interval": 0}
    keys |= {"spikes__deviations": 6.0, "train__steps": 8, "train__micro_batch": 8, **RUNS[rule]}
    config = tiny_config(folder, rule, **keys, train__exit_step=STOPPED)
    train(config, world)
    info = read_checkpoint(config.run.dir)

    def after(info: CheckpointInfo, change: Callable[[Any], None] = lambda parts: None) -> Any:
        """Return the metrics, the counts, and the sums of all tensors after the next two steps."""
        read_into = Reader.read_into

        def loaded(reader, targets, planner) -> None:
            read_into(reader, targets, planner)
            change(planner._state)

        monkeypatch.setattr(Reader, "read_into", loaded)
        trainer = build_trainer(
            replace(config, train=replace(config.train, exit_step=5)), world, *build_data(config)
        )
        metrics: list[dict] = []
        hooks = Hooks(report=lambda line, step: metrics.append(without_times(line)))
        try:
            restore(trainer, info)
        except ResumeError as error:
            return str(error)
        finally:
            monkeypatch.setattr(Reader, "read_into", read_into)
        progress = asdict(trainer.progress)
        for _ in range(2):
            Loop(trainer, hooks).step_and_report()
        tensors = sharded_state(trainer.model, trainer.optimizer)
        sums = {name: part.value.double().sum().item() for name, part in tensors.items()}
        return metrics, progress["unreported"], sums

    expected = after(info)
    assert after(info) == expected  # so that a difference comes from the entry
    kinds = {kind(name) for name in tensors_of(info)}
    assert len(kinds) > 5
    for each in sorted(kinds - ELSEWHERE.keys()):
        assert any(after(info, changed(each, factor)) != expected for factor in (2, 0, -1)), each
    for place, value in entries(info.meta) if rule == "adamw" else ():
        if place not in ELSEWHERE:
            assert after(with_value(info, place, value)) != expected, place


def kind(name: str) -> str:
    """Return the kind of a tensor, which does not include its unit: `weight`, `optimizer/u`,
    `buffer/expert_bias`."""
    first, unit, *rest = name.split("/")
    return "/".join([first, *(rest or ([unit.rpartition(".")[2]] if first == "buffer" else []))])


def changed(wanted: str, factor: int) -> Callable[[Any], None]:
    """Return a function that multiplies every loaded tensor of one kind."""

    def change(parts: Any) -> None:
        for part in parts.values():
            if kind(part.key) == wanted:
                part.value.mul_(factor)

    return change


def entries(meta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path of every value that a resumed run uses, and another value."""
    for section in ("progress", "trainer"):
        for place, value in leaves(meta[section], section):
            match value:
                case bool():
                    yield place, not value
                case int() | float():
                    yield place, value + 1
                case dict():
                    yield place, {"val/loss": 1.0}
                case [float(), *_]:
                    yield place, [1e-3 * i for i, _ in enumerate(value)]
                case list() | None:
                    yield place, [[24, 32]]


def leaves(content: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of nested mappings. Empty mappings are leaves."""
    if isinstance(content, dict) and content and place not in ELSEWHERE:
        for key, value in content.items():
            yield from leaves(value, f"{place}.{key}")
    else:
        yield place, content


def with_value(info: CheckpointInfo, place: str, value: Any) -> CheckpointInfo:
    """Return the checkpoint with another value at `place`."""
    meta = copy.deepcopy(info.meta)
    *path, last = place.split(".")
    section = meta
    for key in path:
        section = section[key]
    section[last] = value
    return replace(info, meta=meta)


def test_entries_that_earlier_versions_saved_of_sso_are_left_out(folder, world, monkeypatch):
    """The entries are the multiplier and the slope of the last step, which no step read."""
    keys = {"checkpoint__interval": 2, "train__exit_step": 2, "train__micro_batch": 8}
    config = tiny_config(folder, **keys)
    begin = SpectralSphereRule.init_state
    with monkeypatch.context() as patch:
        patch.setattr(
            SpectralSphereRule,
            "init_state",
            lambda rule, weight: (
                begin(rule, weight)
                | {name: weight.new_zeros(len(weight)) for name in ("multiplier", "slope")}
            ),
        )
        train(config, world)
    names = tensors_of(read_checkpoint(config.run.dir))
    assert any(name.endswith("/multiplier") for name in names)
    train(replace(config, train=replace(config.train, exit_step=4)), world)
    names = tensors_of(read_checkpoint(config.run.dir))
    assert not any(name.endswith(("/multiplier", "/slope")) for name in names)


def test_an_optimizer_loads_a_state_with_them():
    weight = torch.nn.Parameter(torch.eye(4, 3))
    optimizer = SpectralSphere([weight], lr=1e-2)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry |= {"multiplier": torch.zeros(1), "slope": torch.zeros(1)}
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert weight.isfinite().all()
