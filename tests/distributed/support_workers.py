"""What the ranks of the support matrix run."""

from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from tests.distributed.workers import rank_folder, start
from tests.support_matrix import config_of, row_of
from training.build import build_data, build_trainer
from training.config import Config


def losses(
    folder: str, ranks: int, wanted: list[tuple[str, str]], precision: str | None
) -> dict[str, list[float]]:
    """Losses of two steps, by `row/family`, for every wanted (row, family)."""
    found = {}
    for row in dict.fromkeys(row for row, _ in wanted):
        layout = row_of(row)[0] if ranks > 1 else {}
        groups = start(layout)
        mine = rank_folder(folder)
        for family in (family for other, family in wanted if other == row):
            config = config_of(mine, family, row, ranks, precision)
            found[f"{row}/{family}"] = two_steps(config, groups)
        process_groups.shutdown()
    return found


def two_steps(config: Config, groups: Groups) -> list[float]:
    """Losses of two steps; the second comes after an update of every weight."""
    trainer = build_trainer(config, groups, *build_data(config))
    results = [trainer.step(i) for i in range(2)]
    assert all(result.active.item() for result in results)
    return [result.loss.item() for result in results]
