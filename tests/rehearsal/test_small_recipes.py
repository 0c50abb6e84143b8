"""Every recipe and every full command of docs/papers.md that changes one, made small, with an axis
cut in two, on simulated GPUs."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.papers.catalogue import read_catalogue
from scripts.papers.gpu_hours import key_of
from tests.rehearsal.programs import H100, check_rank
from tests.small_recipes import recipes, small_recipe
from training.config import InvalidConfigError, check
from training.rehearsal.processes import Processes
from training.rehearsal.rank import Job

pytestmark = pytest.mark.slow

NAMES = [name for names in recipes().values() for name in names]
RUNS = {
    key_of(run)
    for paper in read_catalogue().values()
    for item in paper.items.values()
    for run in item.full
}
PEERS = 2
CUTS = ("tensor", "pipeline", "context", "expert")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("run", sorted(RUNS | set(NAMES)))
def test_a_small_run_would_not_break(
    run: str, cut: str, processes: Processes, tmp_path: Path
) -> None:
    recipe, *overrides = shlex.split(run)
    try:
        config = small_recipe(recipe, str(tmp_path), overrides, **{cut: PEERS})
        config = replace(
            config,
            data=replace(config.data, mock=True),
            train=replace(config.train, global_batch=2 * config.train.micro_batch),
            checkpoint=replace(config.checkpoint, interval=2),
            monitors=replace(config.monitors, interval=2 * bool(config.monitors.interval)),
        )
        check(config, PEERS)
    except InvalidConfigError as error:
        pytest.skip(str(error).splitlines()[0])
    rank = PEERS - 1  # also the last stage of a pipeline
    (report,) = processes.perform([Job(config, PEERS, rank, H100)])
    check_rank(report)
