"""Each full command of docs/papers.md that changes a recipe would start: small, on eight pretended
GPUs. The recipes themselves train in tests/distributed/test_recipes.py."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.papers.catalogue import read_catalogue
from scripts.papers.gpu_hours import key_of
from tests.rehearsal.programs import H100, check_rank
from tests.small_recipes import small_recipe
from training.config import check
from training.rehearsal.processes import Processes
from training.rehearsal.rank import Job

pytestmark = pytest.mark.slow

GPUS = 8
RUNS = sorted(
    {
        key_of(run)
        for paper in read_catalogue().values()
        for item in paper.items.values()
        for run in item.full
        if shlex.split(key_of(run))[1:]
    }
)


@pytest.mark.parametrize("run", RUNS)
def test_a_full_command_would_start(run: str, processes: Processes, tmp_path: Path) -> None:
    recipe, *overrides = shlex.split(run)
    config = small_recipe(recipe, str(tmp_path), overrides)
    config = replace(
        config,
        data=replace(config.data, mock=True),
        train=replace(config.train, global_batch=GPUS * config.train.micro_batch),
        checkpoint=replace(config.checkpoint, interval=2),
    )
    check(config, GPUS)
    (report,) = processes.perform([Job(config, GPUS, GPUS - 1, H100)])
    check_rank(report)
