"""Functions that the ranks run in the recipe tests."""

from collections.abc import Sequence
from dataclasses import replace

from tests.distributed.state_workers import started
from tests.small_recipes import small_recipe
from training.run import train

SAVED, ENDED = 24, 30


def saved_and_resumed(folder: str, names: Sequence[str]) -> None:
    """Train each recipe in FOLDER/NAME with data parallelism, then resume it with tensor
    parallelism."""
    lasts = iter((SAVED, ENDED))
    for layout, groups in started([{}, {"tensor": 2}]):
        last = next(lasts)
        for name in names:
            config = small_recipe(name, folder, **layout)
            config = replace(
                config,
                train=replace(config.train, micro_batch=4, exit_step=last, max_skipped_steps=0),
                checkpoint=replace(config.checkpoint, interval=SAVED),
                log=replace(config.log, interval=1),
                watchdog=replace(config.watchdog, replica_interval=1),
            )
            assert train(config, groups).step == last
