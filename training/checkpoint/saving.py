"""Save a run's checkpoints in the background, one at a time, across all ranks."""

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch

from parallel.checkpoint.state_writer import (
    NotFiniteStateError,
    PendingSave,
    StatePlanner,
    WriterError,
    Written,
    first_rank,
    reason,
    start_save,
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

Result = TypeVar("Result")

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
        self._meta: dict[str, Any] = {}
        self._generators: list[Any] = []
        self._folder = Path()
        self._planner = StatePlanner()
        self._attempt = 1
        self._pending: PendingSave | None = None
        self._gathered = False
        """Whether all tensors have been written and rank 0 is sealing the checkpoint."""
        self._sealing: Future[Path] | None = None
        self._retiring: Future[None] | None = None
        self._retired = Aid("older checkpoints are not removed")
        self._removal_is_slow = False
        self._problem: WriterError | None = None
        self._refused = 0

    @property
    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._pending is not None

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Copy this rank's state and start writing it.

        `meta` contains at least the step. Raises CheckpointError if the folder cannot be created,
        and FolderError if the run folder was moved, removed or taken over by another run.
        """
        assert self._pending is None
        self._meta = {**self.facts, **meta}
        self._attempt = 1
        self._generators = on_first(rng_state())
        state = self._new_folder() / STATE
        step = {"step": self._meta["step"]}
        self._pending = start_save(state, self.model, self.optimizer, step, self._planner)

    def _new_folder(self) -> Path:
        """Create the new checkpoint's folder on rank 0 and return its path on all ranks."""
        run_dir, step = self.config.run.dir, self._meta["step"]

        def make() -> Path:
            self.check_folder()
            return checkpoints.new_folder(run_dir, step)

        try:
            self._folder = first_rank(make)
        except WriterError as error:
            self._missed(str(error))
            return self._new_folder()
        return self._folder

    def status(self) -> tuple[int, int]:
        """Return two flags, each 0 or 1: whether the save has failed on this rank, and whether the
        save is still in progress on this rank."""
        done = self._pending is None or self._written()
        return int(self._problem is not None), int(not done)

    def _written(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds, then return whether this rank's part of the save is done or
        has failed."""
        assert self._pending is not None
        try:
            if self._problem is None and not self._gathered:
                return self._pending.poll(timeout)
            if self._problem is None and self._sealing is not None:
                wait([self._sealing], timeout)
                if not self._sealing.done():
                    return False
                self._sealing.result()  # raises the error of a failed save
        except WriterError as error:
            self._problem = error
        return True

    def wait(self, failed_anywhere: Callable[[bool], bool], beat: Callable[[], None]) -> None:
        """Wait for a save in progress to complete. Then wait up to `SLOW` seconds for the removal
        of old checkpoints.

        `failed_anywhere` takes a bool and returns whether it is True on any rank. `beat` is called
        periodically during the first `SLOW` seconds only, so that the watchdog can detect a stuck
        disk. Raises CheckpointError if the save fails.
        """
        while self._pending is not None:
            began, next_warning = time.monotonic(), SLOW
            while not self._written(timeout=1.0):
                waited = time.monotonic() - began
                if waited < SLOW:
                    beat()
                elif waited >= next_warning:
                    self._say_slow(f"step {self._meta['step']} is not saved", waited)
                    next_warning *= 2
            if failed_anywhere(self._problem is not None):
                self.fail()
            else:
                self.advance()
        removal = self._retiring
        if removal is not None:
            # A removal that takes longer than `SLOW` seconds must not hold up training.
            wait([removal], 0 if self._removal_is_slow else SLOW)
            if removal.done():
                removal.result()
                self._retiring = None
            elif not self._removal_is_slow:
                self._say_slow("older checkpoints are not removed", SLOW)
            self._removal_is_slow = not removal.done()

    def _say_slow(self, text: str, seconds: float) -> None:
        text = f"{text} after waiting for {seconds:.0f} s"
        where = f"is {self._folder.parent} on a slow or stuck disk?"
        print(f"warning: rank {self.groups.rank}: {text}; {where}", flush=True)

    def advance(self) -> None:
        """Continue a save. Call this after all ranks have finished their parts of the save.

        After all tensors have been written, rank 0 seals the checkpoint and removes old checkpoints
        in the background.
        """
        assert self._pending is not None
        if not self._gathered:
            written = self._pending.gather()
            self._gathered = True
            if self.groups.rank == 0:
                self._sealing = _in_background(partial(self._seal, self._pending, written))
            return
        self.last_saved = self._meta["step"]
        self._refused = 0
        if self._sealing is not None:
            print(f"saved {self._sealing.result()}", flush=True)
            if self._retiring is None:
                # Run in the background, because removing large files is slow.
                self._retiring = _in_background(self._retire, daemon=True)
        self._reset()

    def _seal(self, pending: PendingSave, written: Sequence[Written]) -> Path:
        """Write all non-tensor files, sync all files, and return the step folder."""
        folder, run_dir = self._folder, Path(self.config.run.dir)
        try:
            with Aid("logs are not synced to disk"):
                sync_all([run_dir, *(path for name in LOGS if (path := run_dir / name).exists())])
            (folder / CONFIG).write_text(self._yaml, encoding="utf-8")
            write_plain(folder / RNG, self._generators)
            files = pending.finish(written)
            done = checkpoints.complete(folder, run_dir, self._meta, files)
        except Exception as error:
            raise WriterError(reason(error, folder)) from error
        with Aid(f"{done} is saved, but {checkpoints.LATEST} is not updated"):
            checkpoints.name_latest(run_dir, done.name)
        return done

    def _retire(self) -> None:
        """Remove old checkpoints, on rank 0. If the removal fails, it is retried after the next
        save."""
        keep = self.config.checkpoint
        with self._retired:
            checkpoints.retire(
                self.config.run.dir, keep_last=keep.keep_last, keep_every=keep.keep_every
            )

    def fail(self) -> None:
        """Retry a failed save on every rank, with the same state.

        After the last attempt, raises CheckpointError with the problems of all ranks. If the state
        contains non-finite values, the save is not retried but dropped with a warning: the guard
        against bad losses may still rewind the run to an earlier step. The `REFUSALS`-th
        consecutive dropped save raises CheckpointError.
        """
        problems = [problem for problem in from_all(self._problem) if problem is not None]
        text, pending = "; ".join(dict.fromkeys(map(str, problems))), self._pending
        if not all(isinstance(problem, NotFiniteStateError) for problem in problems):
            assert pending is not None
            self._missed(text)
            self._pending = pending.again(self._new_folder() / STATE)
            return
        self.abandon()
        self._refused += 1
        if self._refused == REFUSALS:
            raise self._error(f"{text}; this is the last of {REFUSALS} consecutive failures")
        if self.groups.rank == 0:
            print(f"warning: step {self._meta['step']} could not be saved: {text}", flush=True)

    def _missed(self, text: str) -> None:
        """Clean up after a failed attempt to save. Raises CheckpointError if no attempts are
        left."""
        self.abandon()
        if self._attempt == ATTEMPTS:
            raise self._error(text)
        self._attempt += 1
        if self.groups.rank == 0:
            step = self._meta["step"]
            print(f"warning: step {step} could not be saved, trying again: {text}", flush=True)

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"step {self._meta['step']} could not be saved: {text}")

    def abandon(self) -> None:
        """Cancel a save in progress and remove its files if possible.

        If the checkpoint is already being sealed, the save is completed instead.
        """
        if self._pending is not None:
            self._pending.kill()
        if self._sealing is not None:
            wait([self._sealing])
        self._reset()
        if self.groups.rank == 0 and self._folder.name.startswith(".writing-"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reset(self) -> None:
        self._pending = self._sealing = self._problem = None
        self._gathered = False


def _in_background(call: Callable[[], Result], *, daemon: bool = False) -> Future[Result]:
    """Run `call` in a background thread and return its future. Python does not wait for a daemon
    thread at exit."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=daemon).start()
    return future


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
