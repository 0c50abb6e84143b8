"""Checkpoints in the memory of nodes, from which a job that starts its ranks again continues."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import Tensor

from parallel.checkpoint.peer_memory import MemoryFullError, PeerMemory
from parallel.checkpoint.state import load_local_state, local_state
from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.optimizer.optimizer import DistributedOptimizer
from training.checkpoint.saving import rng_state, set_rng_state
from training.config import Config, to_yaml

SHARED_MEMORY: Final = Path("/dev/shm")
"""Where files lie in memory and outlive the process that wrote them."""


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint in memory, as one rank has found it.

    meta        what meta.json has of one on disk, as far as a restart needs it
    tensors     this rank's part of the state
    generators  state of this rank's random number generators
    """

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    generators: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return int(self.meta["step"])

    def load(self, model: ParallelModel, optimizer: DistributedOptimizer) -> None:
        """Set the state of model and optimizer, and this rank's random number generators."""
        load_local_state(self.tensors, model, optimizer)
        set_rng_state(self.generators)


class MemoryCheckpoints:
    """The newest checkpoint in memory of a run. All ranks call its methods together."""

    def __init__(self, config: Config, groups: Groups, root: Path) -> None:
        """`root` is a folder in memory, of which the run has a part of its own."""
        place = hashlib.sha256(str(Path(config.run.dir).resolve()).encode()).hexdigest()[:16]
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.interval = config.checkpoint.memory_interval
        self.memory = PeerMemory(root / f"spectrain-{os.getuid()}-{place}", ranks_here, groups.host)
        self._settings = hashlib.sha256(to_yaml(config).encode()).hexdigest()
        self._first = groups.rank == 0
        self._warned = False

    def due(self, step: int) -> bool:
        """Return whether a checkpoint in memory is due after `step`."""
        return step % self.interval == 0

    def save(
        self, meta: Mapping[str, Any], model: ParallelModel, optimizer: DistributedOptimizer
    ) -> None:
        """Keep a checkpoint instead of the one before; prints once if that is not possible."""
        tensors = local_state(model, optimizer)
        if not all(from_all(are_finite(tensors))):
            self._warn(f"step {meta['step']} is not kept in memory: its state is not finite")
            return
        part = {
            "settings": self._settings,
            "meta": json.dumps(meta),
            "generators": rng_state(),
            "tensors": {name: tensor.detach().cpu() for name, tensor in tensors.items()},
        }
        try:
            self.memory.keep(meta["step"], part)
        except MemoryFullError as error:
            self._warn(f"step {meta['step']} is not kept in memory: {error}")

    def newest(self, after: int) -> MemoryCheckpoint | None:
        """Return the checkpoint in memory if it is of a step past `after`, of a run with the same
        settings, and can be read by every rank; else None."""
        step = self.memory.newest()
        if step is None or step <= after:
            return None
        try:
            path = self.memory.fetch(step)
        except MemoryFullError as error:
            self._warn(f"step {step} in memory is not used: {error}")
            return None
        found, problem = None, ""
        try:
            part = torch.load(path, weights_only=True, mmap=True)
            if part["settings"] != self._settings:
                problem = "it is of a run with other settings"
            found = MemoryCheckpoint(json.loads(part["meta"]), part["tensors"], part["generators"])
        except (OSError, RuntimeError, UnpicklingError, KeyError, TypeError, ValueError) as error:
            problem = f"it cannot be read: {error!r:.200}"
        problems = [text for text in from_all(problem) if text]
        if problems:
            self._warn(f"step {step} in memory is not used: {problems[0]}")
            return None
        return found

    def clear(self) -> None:
        """Forget what is kept, on all nodes."""
        self.memory.clear()

    def _warn(self, text: str) -> None:
        if self._first and not self._warned:
            print(f"warning: {text}", flush=True)
        self._warned = True


def memory_checkpoints(config: Config, groups: Groups) -> MemoryCheckpoints | None:
    """Return the run's checkpoints in memory, None if it is to have none, or if it can have none,
    which is printed; collective."""
    if config.checkpoint.memory_interval == 0:
        return None
    problem = ""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        problem = "nothing starts the ranks again without torchrun --max-restarts"
    elif not SHARED_MEMORY.is_dir():
        problem = f"there is no {SHARED_MEMORY}"
    problems = [text for text in from_all(problem) if text]
    if problems and groups.rank == 0:
        print(f"warning: checkpoint.memory_interval has no effect: {problems[0]}", flush=True)
    return None if problems else MemoryCheckpoints(config, groups, SHARED_MEMORY)


def are_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether no tensor has NaN or infinity; waits for the device once."""
    parts = [torch.isfinite(each).all() for each in tensors.values() if each.is_floating_point()]
    return not parts or bool(torch.stack(parts).all())
