"""What the ranks do to compare releases of the engine: whole runs, and their continuation."""

import shutil
from pathlib import Path

import torch.distributed as dist

from models.engine import engine_version
from parallel.comm.groups import Groups
from tests.distributed.state_workers import label, started
from tests.families import overrides, settings
from tests.run_configs import read_config
from training.loop import StepResult
from training.run import train

SHAPE = {
    "model__layers": 2,
    "model__hidden": 32,
    "model__ffn": 32,
    "model__kv_heads": 4,
    "train__steps": 14,
    "train__global_batch": 4,
    "train__micro_batch": 1,
    "train__sequence_length": 16,
    "checkpoint__interval": 10,
}
STEPS = 10
"""Steps of a run before it saves and stops; its continuation takes three more."""

Layout = dict[str, int]
Losses = dict[str, list[float]]


def runs(config: str, folder: str, cases: list[tuple[Layout, list[str]]]) -> tuple[str, Losses]:
    """Return the engine's version, and the losses of each family of each layout.

    The config is that of the folder CONFIG; each run saves after its last step, in FOLDER/own/CASE.
    """
    losses = {}
    for layout, groups in started([layout for layout, _ in cases]):
        for family in families_of(cases, layout):
            case = f"{label(layout)} {family}"
            place = f"{folder}/own/{case}"
            losses[case] = run(config, family, place, layout, groups, stop=STEPS)
    return engine_version(), losses


def continuations(
    config: str, folder: str, saved: str, cases: list[tuple[Layout, list[str]]]
) -> Losses:
    """Return the losses of three more steps of each run that SAVED/own has."""
    losses = {}
    for layout, groups in started([layout for layout, _ in cases]):
        for family in families_of(cases, layout):
            case = f"{label(layout)} {family}"
            place = f"{folder}/continued/{Path(saved).name}/{case}"
            if groups.rank == 0:
                shutil.copytree(f"{saved}/own/{case}", place)
            dist.barrier()
            losses[case] = run(config, family, place, layout, groups, stop=STEPS + 3)
    return losses


def families_of(cases: list[tuple[Layout, list[str]]], layout: Layout) -> list[str]:
    """Return the families that run on a layout."""
    return next(families for each, families in cases if each == layout)


def run(
    config: str, family: str, place: str, layout: Layout, groups: Groups, *, stop: int
) -> list[float]:
    """Return the losses of a run in the folder `place`, from its checkpoint if there is one."""
    parallel = {f"parallel__{key}": size for key, size in layout.items()}
    keys = {**SHAPE, **overrides(settings(family)), "run__dir": place, "train__exit_step": stop}
    seen: list[float] = []

    def note(step: int, result: StepResult) -> None:
        seen.append(float(result.loss))

    train(read_config(config, **keys, **parallel), groups, on_step=note)
    return seen
