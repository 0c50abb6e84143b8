"""Save a run's checkpoints in the background, one at a time, across all ranks."""

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan

from parallel.checkpoint.state import sharded_state
from parallel.checkpoint.state_writer import (
    NotFiniteStateError,
    PendingSave,
    StatePlanner,
    WriterError,
    Written,
    first_rank,
    reason,
    write_plain,
)
from parallel.comm.collectives import from_all, on_first
from parallel.comm.groups import Groups
from parallel.disk import sync_all
from parallel.model import ParallelModel
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from training.checkpoint import checkpoints
from training.checkpoint.stored_checkpoint import CONFIG, RNG, STATE
from training.config import Config, to_yaml
from training.errors import Aid
from training.report.log_lines import LOGS

ATTEMPTS: Final = 2
"""Maximum number of attempts to save a checkpoint. A second attempt keeps a single disk failure
from ending the run."""
SLOW: Final = 60.0
"""Seconds of waiting for a save or a removal before the first warning. The time doubles with each
warning about a save."""
REFUSALS: Final = 3
"""Number of consecutive checkpoints with non-finite values after which a run ends."""


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written. Earlier checkpoints are left unchanged."""


@dataclass
class Save:
    """A save in progress.

    meta        contents of meta.json, including the step
    generators  RNG states of all ranks, on rank 0 only
    plan        this rank's tensors, which have been copied to host memory
    attempt     number of the current attempt, from 1
    writer      writes this rank's tensors
    sealing     result of sealing the checkpoint, once all ranks have written their tensors
    """

    meta: Mapping[str, Any]
    generators: Sequence[Any]
    plan: SavePlan
    attempt: int = 1
    writer: PendingSave = field(init=False)
    sealing: Future[Path] | None = None

    @property
    def problem(self) -> BaseException | None:
        """Error of the current attempt on this rank, if any."""
        if self.sealing is None:
            return self.writer.problem
        return self.sealing.exception() if self.sealing.done() else None

    def poll(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds, then return whether this rank has written its tensors or,
        after that, sealed the checkpoint. The result is also True after an error."""
        if self.sealing is None:
            return self.writer.poll(timeout)
        wait([self.sealing], timeout)
        return self.sealing.done()


class Removal:
    """Removes a run's old checkpoints in the background, on rank 0.

    If a removal fails, it is repeated after the next save.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._aid = Aid("older checkpoints are not removed")
        self._thread: Thread | None = None
        self._slow = False

    def start(self) -> None:
        """Start a removal unless the last one is still in progress."""
        if self._thread is None:
            # Removing large files is slow, and a process does not wait for daemon threads.
            self._thread = Thread(target=self._remove, daemon=True)
            self._thread.start()

    def _remove(self) -> None:
        keep = self._config.checkpoint
        with self._aid:
            checkpoints.retire(
                self._config.run.dir, keep_last=keep.keep_last, keep_every=keep.keep_every
            )

    def wait(self) -> bool:
        """Wait up to `SLOW` seconds for the removal in progress, if any. Return whether the removal
        takes longer. Later calls then return False and do not wait, so that a slow removal does not
        hold up training."""
        if self._thread is None:
            return False
        self._thread.join(0 if self._slow else SLOW)
        was_slow, self._slow = self._slow, self._thread.is_alive()
        if not self._slow:
            self._thread = None
        return self._slow and not was_slow


class Saver:
    """Saves a run's checkpoints.

    All methods except `status` are collective: all ranks must call them in the same order.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        model: ParallelModel,
        optimizer: DistributedOptimizer,
        facts: Mapping[str, Any],
        *,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """The meta.json of each checkpoint contains `facts` and the argument of `begin`.
        `check_folder` raises InputError on rank 0 if the run folder was moved, removed or taken
        over by another run."""
        self.config = config
        self.groups = groups
        self.model = model
        self.optimizer = optimizer
        self.facts = facts
        self.check_folder = check_folder
        self.last_saved: int | None = None
        # Serialized only once, because this takes longer than copying a small state.
        self._yaml = to_yaml(config)
        self._planner = StatePlanner()
        self._save: Save | None = None
        self._sealer = ThreadPoolExecutor(max_workers=1)
        self._removal = Removal(config)
        self._refused = 0

    @property
    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._save is not None

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Copy this rank's state and start writing it.

        `meta` contains at least the step. Raises CheckpointError if the folder cannot be created,
        and FolderError if the run folder was moved, removed or taken over by another run.
        """
        assert self._save is None
        self.model.wait_for_weights()
        plan = self._planner.stage(sharded_state(self.model, self.optimizer))
        self._attempt(Save({**self.facts, **meta}, on_first(rng_state()), plan))

    def _attempt(self, save: Save) -> None:
        """Start an attempt: create a folder, and write the copied state to it."""

        def new_folder() -> Path:
            self.check_folder()
            return checkpoints.new_folder(self.config.run.dir, save.meta["step"])

        try:
            folder = first_rank(new_folder)
        except WriterError as error:
            return self._retry(save, str(error))
        save.writer, save.sealing = PendingSave(folder / STATE, self._planner, save.plan), None
        self._save = save

    def status(self) -> tuple[int, int]:
        """Return two flags, each 0 or 1: whether the save has failed on this rank, and whether the
        save is still in progress on this rank."""
        if self._save is None:
            return 0, 0
        done = self._save.poll()
        return int(self._save.problem is not None), int(not done)

    def wait(self, failed_anywhere: Callable[[bool], bool], beat: Callable[[], None]) -> None:
        """Wait for a save in progress to complete. Then wait up to `SLOW` seconds for the removal
        of old checkpoints.

        `failed_anywhere` takes a bool and returns whether it is True on any rank. `beat` is called
        periodically during the first `SLOW` seconds only, so that the watchdog can detect a stuck
        disk. Raises CheckpointError if the save fails.
        """
        while (save := self._save) is not None:
            began, next_warning = time.monotonic(), SLOW
            while not save.poll(timeout=1.0):
                waited = time.monotonic() - began
                if waited < SLOW:
                    beat()
                elif waited >= next_warning:
                    self._say_slow(f"step {save.meta['step']} is not saved", waited)
                    next_warning *= 2
            if failed_anywhere(save.problem is not None):
                self.fail()
            else:
                self.advance()
        if self._removal.wait():
            self._say_slow("older checkpoints are not removed", SLOW)

    def _say_slow(self, text: str, seconds: float) -> None:
        text = f"{text} after waiting for {seconds:.0f} s"
        folder = Path(self.config.run.dir) / checkpoints.FOLDER
        where = f"is {folder} on a slow or stuck disk?"
        print(f"warning: rank {self.groups.rank}: {text}; {where}", flush=True)

    def advance(self) -> None:
        """Continue a save. Call this after all ranks have finished their parts of the save.

        After all tensors have been written, rank 0 seals the checkpoint and removes old checkpoints
        in the background.
        """
        save = self._save
        assert save is not None
        first = self.groups.rank == 0
        if save.sealing is None:
            written = save.writer.gather()
            if first:
                save.sealing = self._sealer.submit(self._seal, save, written)
            else:
                save.sealing = Future()
                save.sealing.set_result(Path())
            return
        self._save, self._refused, self.last_saved = None, 0, save.meta["step"]
        if first:
            print(f"saved {save.sealing.result()}", flush=True)
            self._removal.start()

    def _seal(self, save: Save, written: Sequence[Written]) -> Path:
        """Write all non-tensor files, sync all files, and return the step folder."""
        folder, run_dir = save.writer.folder.parent, Path(self.config.run.dir)
        try:
            with Aid("logs are not synced to disk"):
                sync_all([run_dir, *(path for name in LOGS if (path := run_dir / name).exists())])
            (folder / CONFIG).write_text(self._yaml, encoding="utf-8")
            write_plain(folder / RNG, save.generators)
            files = save.writer.finish(written, {"step": save.meta["step"]})
            done = checkpoints.complete(folder, run_dir, save.meta, files)
        except Exception as error:
            raise WriterError(reason(error, folder)) from error
        with Aid(f"{done} is saved, but {checkpoints.LATEST} is not updated"):
            checkpoints.name_latest(run_dir, done.name)
        return done

    def fail(self) -> None:
        """Retry a failed save on every rank, with the same state.

        After the last attempt, raises CheckpointError with the problems of all ranks. If the state
        contains non-finite values, the save is not retried but dropped with a warning: the guard
        against bad losses may still rewind the run to an earlier step. The `REFUSALS`-th
        consecutive dropped save raises CheckpointError.
        """
        save = self._save
        assert save is not None
        problems = [problem for problem in from_all(save.problem) if problem is not None]
        text = "; ".join(dict.fromkeys(map(str, problems)))
        self.abandon()
        if not all(isinstance(problem, NotFiniteStateError) for problem in problems):
            return self._retry(save, text)
        self._refused += 1
        text = f"step {save.meta['step']} could not be saved: {text}"
        if self._refused == REFUSALS:
            raise CheckpointError(f"{text}; this is the last of {REFUSALS} consecutive failures")
        if self.groups.rank == 0:
            print(f"warning: {text}", flush=True)

    def _retry(self, save: Save, text: str) -> None:
        """Start another attempt after the error `text`. Raises CheckpointError if no attempts are
        left."""
        failed = f"step {save.meta['step']} could not be saved"
        if save.attempt == ATTEMPTS:
            raise CheckpointError(f"{failed}: {text}")
        save.attempt += 1
        if self.groups.rank == 0:
            print(f"warning: {failed}, trying again: {text}", flush=True)
        self._attempt(save)

    def abandon(self) -> None:
        """Cancel a save in progress and remove its files if possible.

        If the checkpoint is already being sealed, the save is completed instead.
        """
        save, self._save = self._save, None
        if save is None:
            return
        save.writer.kill()
        if save.sealing is not None:
            wait([save.sealing])
        if self.groups.rank == 0:
            shutil.rmtree(save.writer.folder.parent, ignore_errors=True)


def rng_state() -> dict[str, Any]:
    """Return this process's RNG states as plain values and tensors."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the RNG states returned by `rng_state`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
