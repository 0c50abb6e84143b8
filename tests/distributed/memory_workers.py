"""What the ranks of the tests of checkpoints in memory do: four ranks on two pretended nodes."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.checkpoint.state import local_state
from parallel.comm.groups import Groups
from tests.distributed.state_workers import started
from tests.run_configs import read_config
from training.build import build_data, build_trainer
from training.checkpoint.memory import MemoryCheckpoints
from training.config import Config
from training.loop import Trainer
from training.restore import restore_from_memory

RANKS_PER_NODE = 2


def new_trainer(config: Config, groups: Groups) -> Trainer:
    return build_trainer(config, groups, *build_data(config))


def stepped(trainer: Trainer, step: int) -> dict[str, Tensor]:
    """Train to `step` and return a copy of this rank's part of the state."""
    while trainer.progress.step < step:
        trainer.advance()
    return {k: v.clone() for k, v in local_state(trainer.model, trainer.optimizer).items()}


def memory_of(config: Config, groups: Groups, folder: str) -> MemoryCheckpoints:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    return MemoryCheckpoints(config, groups, node_folder(folder))


def node_folder(folder: str) -> Path:
    return Path(folder) / f"node_{dist.get_rank() // RANKS_PER_NODE}"


def lose_node(folder: str, node: int) -> None:
    """Remove what a node has in memory."""
    dist.barrier()
    if dist.get_rank() == node * RANKS_PER_NODE:
        shutil.rmtree(Path(folder) / f"node_{node}")
    dist.barrier()


def continued(
    folder: str, layout: dict[str, int], cases: dict[str, dict[str, Any]]
) -> dict[str, list[str]]:
    """Return by case the tensors that differ, after four steps, between a run and one that goes on
    after the second from memory, of which a node was lost."""
    found = {}
    for _, groups in started([layout]):
        for number, (name, keys) in enumerate(cases.items()):
            config = read_config(folder, **keys, checkpoint__memory_interval=1)
            place = f"{folder}/{number}"
            trainer = new_trainer(config, groups)
            memory = memory_of(config, groups, place)
            for step in (1, 2):
                stepped(trainer, step)
                memory.save(
                    trainer.checkpoint() | {"run_id": "x"}, trainer.model, trainer.optimizer
                )
            whole = stepped(trainer, 4)
            lose_node(place, number % 2)
            kept = memory_of(config, groups, place).newest(1)
            assert kept is not None and kept.step == 2 and kept.meta["run_id"] == "x"
            other = new_trainer(config, groups)
            restore_from_memory(other, kept)
            again = stepped(other, 4)
            memory = memory_of(config, groups, place)
            memory.save(other.checkpoint() | {"run_id": "x"}, other.model, other.optimizer)
            assert set(memory.memory._here()) == {4}  # what was lost has all of it again
            assert whole.keys() == again.keys()
            found[name] = [key for key in whole if not torch.equal(whole[key], again[key])]
    return found


def refused(folder: str) -> dict[str, Any]:
    """Return what is found where it may not be used, or is not there."""
    found: dict[str, Any] = {}
    for _, groups in started([{}]):
        config = read_config(folder, checkpoint__memory_interval=1)
        trainer = new_trainer(config, groups)
        memory = memory_of(config, groups, folder)

        def save(step: int) -> None:
            stepped(trainer, step)  # noqa: B023
            memory.save(trainer.checkpoint(), trainer.model, trainer.optimizer)  # noqa: B023

        def newest(**keys: Any) -> int | None:
            other = read_config(folder, checkpoint__memory_interval=1, **keys)
            kept = memory_of(other, groups, folder).newest(0)  # noqa: B023
            return kept.step if kept is not None else None

        found["nothing"] = newest()
        save(1)
        found["kept"] = newest()
        found["not after"] = memory.newest(1)
        found["other settings"] = newest(optimizer__matrix__lr=0.5)
        # No rank of the first node can write: a file lies where its folder would be.
        if dist.get_rank() < RANKS_PER_NODE:
            memory.memory._folder(2).write_text("")
        dist.barrier()
        save(2)
        dist.barrier()
        found["full"] = newest()
        part = memory.memory._path(1, dist.get_rank())
        if dist.get_rank() == 3:
            content = part.read_bytes()
            part.write_bytes(content[: len(content) // 2])
        dist.barrier()
        found["damaged"] = newest()
        with torch.no_grad():
            if dist.get_rank() == 1:
                trainer.model.domains[0].buffers.masters[0].view(-1)[0] = torch.nan
        save(3)
        found["not finite"] = sorted(memory.memory._here())
        for node in (0, 1):
            lose_node(folder, node)
        found["both lost"] = newest()
        memory.clear()
    return found
