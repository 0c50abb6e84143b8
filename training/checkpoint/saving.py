"""Saving a run: one checkpoint at a time, written in the background, completed by all ranks."""

import contextlib
import random
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from parallel.checkpoint.save_plan import StatePlanner
from parallel.checkpoint.state_writer import (
    NotFiniteStateError,
    PendingSave,
    WriterError,
    first_rank,
    start_save,
)
from parallel.comm.collectives import from_all, on_first
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.optimizer.optimizer import DistributedOptimizer
from training.checkpoint import files as checkpoint
from training.config import Config, to_yaml

REFUSALS: Final = 3
"""Checkpoints in a row whose state is not finite that end a run."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written. Earlier ones are unchanged."""


class Saver:
    """Saves the run of one model.

    All ranks call the same methods in the same order, except `status`, which is local.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        model: ParallelModel,
        optimizer: DistributedOptimizer,
        facts: Mapping[str, Any],
    ) -> None:
        """`facts` goes into every meta.json, beside what `begin` is given."""
        self.config = config
        self.groups = groups
        self.model = model
        self.optimizer = optimizer
        self.facts = facts
        self.last_saved: int | None = None
        self._yaml = to_yaml(config)  # once, as it takes longer than copying a small state
        self._meta: dict[str, Any] = {}
        self._folder = Path()
        self._planner = StatePlanner()
        self._pending: PendingSave | None = None
        self._retiring: Future[list[int]] | None = None
        self._problem: WriterError | None = None
        self._refused = 0

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Copy this rank's state and start to write it.

        `meta` has at least the step. Raises CheckpointError if the folder cannot be made.
        """
        assert self._pending is None
        self._retired()
        self._meta = {**self.facts, **meta}
        generators = on_first(rng_state())
        with self._reported():
            self._folder = first_rank(lambda: self._prepare(generators))
            step = {"step": self._meta["step"]}
            state = self._folder / checkpoint.STATE
            self._pending = start_save(state, self.model, self.optimizer, step, self._planner)

    def _prepare(self, generators: list[Any]) -> Path:
        """Make the folder to write to, with the files that rank 0 writes before the tensors."""
        folder = checkpoint.new_folder(self.config.run.dir, self._meta["step"])
        (folder / checkpoint.CONFIG).write_text(self._yaml)
        with (folder / checkpoint.RNG).open("wb") as file:
            torch.save(generators, file)
        return folder

    def status(self) -> tuple[int, int]:
        """Return whether this rank's writer failed and whether it still writes, as 0 or 1."""
        done = self._pending is None or self._written()
        return int(self._problem is not None), int(not done)

    def _written(self, timeout: float = 0.0) -> bool:
        """Whether this rank's writer has ended, well or not, after at most `timeout` seconds."""
        assert self._pending is not None
        try:
            return self._problem is not None or self._pending.writer.poll(timeout)
        except WriterError as error:
            self._problem = error
        return True

    def wait(self, failed_anywhere: Callable[[bool], bool], beat: Callable[[], None]) -> None:
        """Wait until the save under way, if any, is complete and old checkpoints are removed.

        `failed_anywhere` returns on every rank whether its argument is true on any; `beat` is
        called while waiting. Raises CheckpointError if a writer failed.
        """
        if self._pending is not None:
            while not self._written(timeout=1.0):
                beat()
            if failed_anywhere(self._problem is not None):
                self.fail()
            else:
                self.complete()
        self._retired()

    def complete(self) -> None:
        """Complete the save that every rank has written, and start to remove old checkpoints."""
        assert self._pending is not None
        run_dir, step = self.config.run.dir, self._meta["step"]
        with self._reported():
            files = self._pending.finish()
            done = first_rank(lambda: checkpoint.complete(self._folder, run_dir, self._meta, files))
        self._pending = None
        self._refused = 0
        self.last_saved = step
        try:
            first_rank(lambda: self._announce(done))
        except WriterError as error:
            text = (
                f"step {step} is saved in {done}, but {checkpoint.LATEST} does not name it: {error}"
            )
            raise CheckpointError(text) from error

    def _announce(self, done: Path) -> None:
        """Update `latest`, print where the checkpoint is, and start to remove old ones (rank 0)."""
        run_dir, keep = self.config.run.dir, self.config.checkpoint
        checkpoint.name_latest(run_dir, done.name)
        print(f"saved {done}", flush=True)
        # Removing large files takes the file system longer than all the rest.
        retire = partial(checkpoint.retire, keep_last=keep.keep_last, keep_every=keep.keep_every)
        beside = ThreadPoolExecutor(max_workers=1)
        self._retiring = beside.submit(retire, run_dir)
        beside.shutdown(wait=False)

    def _retired(self) -> None:
        """Wait until old checkpoints are removed.

        Raises CheckpointError, on every rank, if they could not be.
        """
        retiring, self._retiring = self._retiring, None
        try:
            first_rank(lambda: None if retiring is None else retiring.result())
        except WriterError as error:
            text = f"step {self.last_saved} is saved, but older ones are not removed: {error}"
            raise CheckpointError(text) from error

    def fail(self) -> None:
        """Raise CheckpointError, on every rank, with the problems of all ranks.

        If the only problem is a state that is not finite, print a warning and drop the checkpoint
        instead, fewer than `REFUSALS` times in a row: the guard of its losses may yet take the run
        back to an earlier step.
        """
        problems = [problem for problem in from_all(self._problem) if problem is not None]
        said = "; ".join(dict.fromkeys(map(str, problems)))
        self._refused += 1
        if self._refused == REFUSALS:
            said += f"; {REFUSALS} checkpoints in a row"
        if self._refused == REFUSALS or not all(
            isinstance(problem, NotFiniteStateError) for problem in problems
        ):
            with self._reported():
                raise WriterError(said)
        self.abandon()
        if self.groups.rank == 0:
            print(f"warning: step {self._meta['step']} is not saved: {said}", flush=True)

    @contextlib.contextmanager
    def _reported(self) -> Any:
        """Turn WriterError into CheckpointError, and remove what was written."""
        try:
            yield
        except WriterError as error:
            self.abandon()
            step = self._meta["step"]
            raise CheckpointError(f"step {step} could not be saved: {error}") from error

    def abandon(self) -> None:
        """End a save under way and remove what it has written, as far as possible."""
        if self._pending is not None:
            self._pending.writer.kill()
            self._pending = None
        self._problem = None
        if self.groups.rank == 0 and self._folder.name.startswith(".writing-"):
            shutil.rmtree(self._folder, ignore_errors=True)


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random number generators, as plain values and tensors."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators to what `rng_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
