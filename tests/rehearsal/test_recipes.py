"""Every recipe at full size on eight pretended H100s, as it is and with its model cut.

Takes an hour of two processors: make test-all runs it, make test does not."""

from dataclasses import replace

import pytest

from tests.paths import ROOT
from tests.rehearsal.programs import H100
from training.config import Config, InvalidConfigError, check, load_config
from training.rehearsal.job import Job
from training.rehearsal.processes import Processes
from training.rehearsal.report import combined

GPUS = 8
"""What the recipes name: a node."""

LARGE = {"deepseek16b": 64, "deepseek236b": 1024, "moe_8b_a1b": 64}
"""GPUs of recipes whose model no node has room for."""

RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
CUTS = ["", "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "parallel.expert=2"]


def gpus_of(recipe: str) -> int:
    """The number of GPUs that a recipe is rehearsed on."""
    return next((n for name, n in LARGE.items() if recipe.startswith(name)), GPUS)


def recipe_config(recipe: str, *changes: str) -> Config:
    """The config of a recipe on made tokens, its batch as large as its GPUs need.

    Raises InvalidConfigError for what it may not."""
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", changes)
    config = replace(config, data=replace(config.data, mock=True))
    if config.model.vocab_size is None:
        config = replace(config, model=replace(config.model, vocab_size=50304))
    each = config.train.micro_batch * gpus_of(recipe)
    batch = -(-config.train.global_batch // each) * each
    config = replace(config, train=replace(config.train, global_batch=batch))
    check(config, gpus_of(recipe))
    return config


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_would_not_break(recipe: str, cut: str, processes: Processes) -> None:
    try:
        config = recipe_config(recipe, *filter(None, [cut]))
    except InvalidConfigError as error:
        assert cut, error
        pytest.skip(str(error).splitlines()[0])
    world = gpus_of(recipe)
    report = combined(processes.perform([Job(config, world, 0, H100)]), world, H100)
    assert report.ok, report.error
