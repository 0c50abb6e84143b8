"""Runs of a study: pretrain.py in a fork of one thread each, unless a record says the result."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from scripts.studies.records import Record, RecordBook
from scripts.studies.summary import summary
from scripts.studies.worker import Worker
from training.config.files import read_merged
from training.errors import InputError
from training.lifecycle.run_folder import DONE, mark_done

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One run: what it is called, its config file, and all overrides over that, seed included."""

    label: str
    config: str
    overrides: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """Its config file and overrides."""
        return [self.config, *self.overrides]

    @property
    def key(self) -> str:
        """sha256 of what the config file, its bases and the overrides say together, in hex."""
        merged = read_merged(ROOT / self.config, self.overrides)
        return hashlib.sha256(json.dumps(merged, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in self.label)


class RunFailedError(InputError):
    """A run that ended without a loss, and not because its loss or gradient was not finite."""


class Trainer:
    """Trains runs in folders under `output` and keeps their records in `book`."""

    def __init__(
        self, output: Path, book: RecordBook, environment: Mapping[str, str] | None = None
    ) -> None:
        self.output = output
        self.book = book
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._idle: SimpleQueue[Worker] = SimpleQueue()

    def record(self, run: Run) -> Record:
        """The record of a run, which is trained now unless there is one.

        Raises RunFailedError for a run that cannot be trained.
        """
        found = self.book.find(run.key)
        if found is not None:
            return found
        record = self._train(run)
        self.book.add(record)
        shown = "not finite" if record.loss is None else f"{record.loss:.4f}"
        print(f"{run.label}: {shown} ({record.seconds:.0f} s)", flush=True)
        return record

    def _train(self, run: Run) -> Record:
        folder = self.output / run.folder
        folder.mkdir(parents=True, exist_ok=True)
        mark_done(folder, False)
        log = folder / "log.txt"
        arguments = ["--config", str(ROOT / run.config), *run.overrides, f"run.dir={folder}"]
        worker = self._worker()
        code, seconds = worker.run([*arguments, "--resume", "none"], log)
        self._idle.put(worker)
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["nothing"])[-1]
        not_finite = code == 1 and "not finite" in last
        figures = summary(folder) if (folder / DONE).exists() or not_finite else {}
        loss = figures.get("loss")
        finite = loss is not None and math.isfinite(loss)
        if not not_finite and (code != 0 or loss is None):
            raise RunFailedError(f"{run.label}, ended with {code} and without a loss: {last}")
        failed = not_finite or not finite
        return Record(run.key, run.label, run.settings, failed, round(seconds, 1), figures)

    def _worker(self) -> Worker:
        """A worker that does nothing now."""
        try:
            return self._idle.get_nowait()
        except Empty:
            return Worker(self.environment)

    def close(self) -> None:
        """End the workers, when no run is under way."""
        while not self._idle.empty():
            self._idle.get_nowait().close()
