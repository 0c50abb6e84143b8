"""Recipes, and commands in docs/papers.md that change a recipe, at a small size on two simulated
GPUs. Each recipe is split along one parallel axis, and the axes take turns. If recipes differ only
in numbers, one of these recipes is tested."""

import shlex
from dataclasses import replace

import pytest

from scripts.papers.catalogue import key_of, read_catalogue
from tests.rehearsal.programs import sound
from tests.small_recipes import distinct, recipes, small_recipe
from training.config import InvalidConfigError, check

pytestmark = pytest.mark.slow

RUNS = {name for names in recipes().values() for name in names} | {
    key_of(run)
    for paper in read_catalogue().values()
    for item in paper.items.values()
    for run in item.full
}
PEERS = 2
CUTS = ("tensor", "pipeline", "context", "expert")


@pytest.mark.parametrize(("run", "first"), [(run, i) for i, run in enumerate(distinct(RUNS))])
def test_a_small_run_would_not_break(run, first, perform, tmp_path) -> None:
    recipe, *overrides = shlex.split(run)
    turn = first % len(CUTS)
    for cut in CUTS[turn:] + CUTS[:turn]:
        try:
            config = small_recipe(recipe, str(tmp_path), overrides, **{cut: PEERS})
            if not config.train.batch_ramp:
                batch = 2 * config.train.micro_batch
                config = replace(config, train=replace(config.train, global_batch=batch))
            config = replace(
                config,
                data=replace(config.data, mock=True),
                checkpoint=replace(config.checkpoint, interval=2),
                monitors=replace(config.monitors, interval=2 * bool(config.monitors.interval)),
            )
            if config.data.document_mask:  # on a GPU only kernels of 16 bits have documents
                config = replace(config, train=replace(config.train, precision="bf16"))
            check(config, PEERS)
            break
        except InvalidConfigError:  # dense models have no experts to cut, PC layers no pieces
            continue
    else:
        pytest.fail("no axis of this run can be cut")
    sound(perform, config, PEERS, PEERS - 1)  # also the last stage of a pipeline
