"""What the ranks of the tests of flipped bits do."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups
from parallel.optimizer.build import DisagreementError
from tests.distributed.state_workers import started
from tests.run_configs import read_config
from training.build import build_data, build_trainer
from training.loop import Trainer

INTEGERS = {2: torch.int16, 4: torch.int32}


def flips(
    folder: str, layout: dict[str, int], cases: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, tuple[int, int, str]]:
    """Return by case the rank whose memory was changed, the step at which it ended, and its words.

    cases   what is flipped, keys of the config
    """
    found = {}
    for _, groups in started([layout]):
        for name, (what, keys) in cases.items():
            found[name] = flipped(folder, groups, what, keys)
    return found


def flipped(folder: str, groups: Groups, what: str, keys: dict[str, Any]) -> tuple[int, int, str]:
    """Flip one bit after step 3, on the last rank that has such a weight, and train on."""
    trainers: list[Trainer] = []

    def flip(step: int, result: object) -> None:
        if step == 3 and dist.get_rank() == chosen:
            flat = memory(trainers[0], what)
            assert flat is not None
            flat.view(INTEGERS[flat.element_size()])[flat.numel() - 1] ^= 1

    config = read_config(folder, **keys)
    trainers.append(build_trainer(config, groups, *build_data(config), on_step=flip))
    has = from_all(memory(trainers[0], what) is not None)
    chosen = max((rank for rank, there in enumerate(has) if there), default=-1)
    try:
        outcome = trainers[0].run()
    except DisagreementError as error:
        return chosen, trainers[0].progress.step, str(error)
    return chosen, outcome.step, ""


def memory(trainer: Trainer, what: str) -> Tensor | None:
    """Return the flat memory of the last weight of a kind, None if this rank has none."""
    part, domain = trainer.model.domains[0], trainer.optimizer.domains[0]
    buffers = part.buffers
    bucket = buffers.bucket_layout.buckets[-1]
    slot = bucket.slots[-1]
    if what == "parameter":
        return buffers.parameters[-1].narrow(0, slot.offset, slot.numel)
    if what == "master":
        size = buffers.masters[-1].numel()
        end = min(slot.offset + slot.numel - buffers.replicas.rank * size, size)
        return buffers.masters[-1][:end]
    for group in domain.step_groups:
        if what == "kept" and group.kept:
            return list(group.kept.values())[-1].view(-1)
        if what == "PC layer" and group.materialized.stacks:
            return group.materialized.stacks[-1].weight.view(-1)
    return None
