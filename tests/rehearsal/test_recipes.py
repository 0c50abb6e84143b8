"""Every recipe and every full command of docs/papers.md that changes one, on pretended GPUs: small,
with an axis cut in two, and at full size on the GPUs that it names, which takes hours."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from parallel.plan.devices import device_named
from scripts.papers.catalogue import read_catalogue
from scripts.papers.gpu_hours import key_of
from tests.paths import ROOT
from tests.rehearsal.programs import H100, check_rank
from tests.small_recipes import recipes, small_recipe
from training.build import on_mock_tokens
from training.config import InvalidConfigError, check, load_config
from training.rehearsal.processes import Processes
from training.rehearsal.rank import Job
from training.rehearsal.rehearse import rehearse

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


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_would_not_break(recipe: str, processes: Processes) -> None:
    config = on_mock_tokens(load_config(ROOT / "configs" / f"{recipe}.yaml"))
    assert config.plan.gpus is not None
    check(config, config.plan.gpus)
    device = device_named(config.plan.device)
    report = rehearse(config, config.plan.gpus, device, processes=processes)
    assert report.ok, report.error
