"""What the ranks of the test of the communication volume run."""

from typing import Any

import torch

from parallel.comm import groups as process_groups
from tests.distributed.workers import built, start


def sent_in_one_step(
    folder: str, layout: dict[str, int], runs: list[dict[str, Any]]
) -> list[dict[str, int]]:
    """Bytes that this rank sends in one training step, by kind, for the overrides of every run.

    `stage` is its pipeline rank.
    """
    layout_groups = start(layout)
    found = []
    for overrides in runs:
        trainer = built(folder, layout_groups, (layout, "spectral_sphere", overrides))
        comm_volume = trainer.model.comm_volume
        comm_volume.clear()
        trainer.step(0)
        trainer.model.wait_for_weights()
        found.append({"stage": layout_groups.pipeline.rank, **comm_volume})
        torch.distributed.barrier()
    process_groups.shutdown()
    return found
