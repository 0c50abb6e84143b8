"""Train the unrecorded runs of a study with pretrain.py, using one thread per rank.

Several runs may share this node's CPUs or GPUs at a time.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from itertools import groupby, takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import torch

from scripts.command import warn
from scripts.studies.records import Record, RecordBook, claimed
from training.command_line import PROCESS_COUNTS
from training.config.yaml_files import Content, flat, read_merged
from training.data.hashes import file_sha256
from training.data.manifest import manifest_of
from training.errors import InputError
from training.lifecycle.run_folder import DONE, in_use, mark_done
from training.machine.device import versions
from training.report.log_lines import read_metrics

ROOT: Final = Path(__file__).resolve().parents[2]
PAUSE: Final = 1.0
"""Seconds between checks for records of runs trained by other processes."""

UNKNOWN: Final = "unknown"
"""Placeholder for the sha256 of an unknown tokenizer."""


@dataclass(frozen=True)
class Run:
    """A run: its label, config file and all overrides, including the seed."""

    label: str
    config: str
    overrides: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """The config file followed by the overrides."""
        return [self.config, *self.overrides]

    @cached_property
    def merged(self) -> Content:
        """The contents of the config file, merged with its bases and the overrides."""
        return read_merged(ROOT / self.config, self.overrides)

    @cached_property
    def key(self) -> str:
        """The sha256 of `merged`, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.merged, sort_keys=True).encode()).hexdigest()

    @property
    def data(self) -> dict[str, list[str]]:
        """The result of `digests` for each existing dataset, by path."""
        named = flat(self.merged.get("data", {}))
        paths = [str(value) for key, value in named if key.endswith(".path")]
        sums_by_path = {path: digests(ROOT / path) for path in paths}
        return {path: sums for path, sums in sums_by_path.items() if sums}

    @property
    def folder(self) -> str:
        """The name of the run folder."""
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in self.label)


def digests(prefix: Path) -> list[str]:
    """Return the sha256 of a dataset's tokenizer and files, or [] if the files do not exist.

    The sha256 of the tokenizer is `UNKNOWN` if no manifest lists the dataset.
    """
    manifest = manifest_of(prefix)
    if manifest is not None:
        return [manifest.tokenizer.sha256, *manifest.sets[prefix.name].sha256.values()]
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    if not all(file.is_file() for file in files):
        return []
    sums = [UNKNOWN]
    for file in files:
        facts = file.stat()
        sums.append(_digest(file, (facts.st_ino, facts.st_size, facts.st_mtime_ns)))
    return sums


@cache
def _digest(file: Path, version: tuple[int, int, int]) -> str:
    """Return the sha256 of a file, cached by `version`: the file's inode, size and modification
    time, which change when the file is replaced."""
    return file_sha256(file)


@dataclass(frozen=True)
class Place:
    """A share of this node's resources, which trains one run at a time.

    ranks   number of ranks per run
    gpus    GPU names to set in CUDA_VISIBLE_DEVICES; None: all GPUs
    """

    ranks: int = 1
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for runs on these resources."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def places(options: argparse.Namespace) -> list[Place]:
    """Return the places requested by the options, one per concurrent run.

    Raises InputError if the options request more GPUs than this node has.
    """
    each: int | None = options.gpus_per_run
    if each is None:
        return [Place(options.nproc)] * (options.jobs or 1)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        gpus = [str(i) for i in range(torch.cuda.device_count())]
    else:  # as in CUDA, the list ends at the first invalid name
        names = (name.strip() for name in named.split(","))
        gpus = list(takewhile(lambda name: name and not name.startswith("-"), names))
    most = len(gpus) // each
    if most == 0:
        raise InputError(
            f"--gpus-per-run must be at most {len(gpus)}, the number of GPUs on this node, got "
            f"{each}"
        )
    jobs: int = options.jobs or most
    if jobs > most:
        raise InputError(
            f"--jobs must be at most {most} with --gpus-per-run {each} on {len(gpus)} GPUs, "
            f"got {jobs}"
        )
    return [Place(each, tuple(gpus[i * each : (i + 1) * each])) for i in range(jobs)]


class RunFailedError(InputError):
    """Raised if the data changes during a run. Also raised if a run ends without a loss, unless the
    reason is a nonfinite loss or gradient."""


class StudyTrainer:
    """Trains a study's runs, with run folders in `output` and records in `book`.

    Several processes, on one or more nodes, may share the folders. Each run is trained by one
    process, and all processes read its record.
    """

    def __init__(
        self,
        output: Path,
        book: RecordBook,
        places: Sequence[Place] = (Place(),),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to train one run at a time in each place, with the variables in `environment`."""
        self.output = output
        self.book = book
        self.given = dict(environment or {})
        # A study starts each run once, even if srun started several processes of the study.
        inherited = {name: text for name, text in os.environ.items() if name not in PROCESS_COUNTS}
        self.environment = {**inherited, "OMP_NUM_THREADS": "1", **self.given}
        self.versions = versions()
        self._pool = ThreadPoolExecutor(len(places))
        self._begun: dict[str, Future[bool]] = {}
        self._warned: set[str] = set()
        self._logs: list[Path] = []
        self._free: SimpleQueue[Place] = SimpleQueue()
        for place in places:
            self._free.put(place)

    def state(self) -> str:
        """Return the folder and last step of each run in progress. Before the first step, return
        the run's last output line instead."""
        lines = []
        for log in [*self._logs]:
            text = lines_of(log) or ["starts"]
            last = next((line for line in reversed(text) if line.startswith("step ")), text[-1])
            lines.append(f"{log.parent.name}: {last:.80}")
        return "; ".join(lines) or "no runs in progress in this process"

    def begin(self, runs: Iterable[Run]) -> None:
        """Queue the runs without a record, in order, and return immediately.

        Raises InputError if a record's data or environment does not match its run.
        """
        for run in runs:
            key = run.key
            if key in self.book:
                self._check(run, self.book[key])
            elif key not in self._begun:
                self._begun[key] = self._pool.submit(self._try, key, run)

    def records(self, runs: Iterable[Run]) -> list[Record]:
        """Train the runs without a record, and return the records of all runs in order.

        Raises RunFailedError if a run cannot be trained.
        """
        keys = [(run.key, run) for run in runs]
        missing = dict(keys)
        while missing:
            self.begin(missing.values())
            tried = [(key, self._begun.pop(key, None)) for key in missing]
            done = {key for key, future in tried if future is None or future.result()}
            missing = {key: run for key, run in missing.items() if key not in done}
            if missing:
                time.sleep(PAUSE)
                self.book.refresh()
        return [self.book[key] for key, _ in keys]

    def _check(self, run: Run, record: Record) -> None:
        """Raise InputError if a record's data or environment does not match the run. Warn once
        about records without facts, and once about records of other software versions."""
        if not record.facts:
            text = "records from earlier versions contain no hashes to check the data against"
            self._warn("facts", text)
        for name, was in record.facts.get("versions", {}).items():
            if (now := self.versions.get(name)) != was:
                text = f"{name} was {was} in earlier runs such as {record.label}, but is {now}"
                self._warn(name, text)
        for kind, now in self._facts(run).items():
            was = record.facts.get(kind, now)
            if was != now:
                raise InputError(
                    f"{self.book.path}: {kind} in the record of {run.label} must be {now}, got "
                    f"{was}; choose another --results folder, or delete the record"
                )

    def _warn(self, about: str, text: str) -> None:
        """Print a warning, once for each value of `about`."""
        if about not in self._warned:
            self._warned.add(about)
            warn(f"{self.book.path}: {text}")

    def _facts(self, run: Run) -> dict[str, Any]:
        """Return a run's environment and data."""
        return {"environment": self.given, "data": run.data}

    def _try(self, key: str, run: Run) -> bool:
        """Train a run unless it has a record. Return False if another process is training it.

        That process may have been started by a study that has since been killed.
        """
        folder = self.output / run.folder
        with claimed(folder) as mine:
            if not mine:
                return False
            self.book.refresh()  # the previous holder of the claim may have trained the run
            if key in self.book:
                return True
            record = self._train(key, run, folder)
            if record is None:
                return False
            self.book.add(record)
        shown = "not finite" if record.loss is None else f"{record.loss:.4f}"
        print(f"{run.label}: {shown} ({record.seconds:.0f} s)", flush=True)
        return True

    def _train(self, key: str, run: Run, folder: Path) -> Record | None:
        """Train a run and return its record, or None if its folder is in use."""
        if in_use(folder):
            return None
        mark_done(folder, False)
        log = folder / "log.txt"
        facts = self._facts(run)
        arguments = ["--config", str(ROOT / run.config), *run.overrides, f"run.dir={folder}"]
        code, seconds = self._run([*arguments, "--resume", "none"], log)
        reason = message(log)
        not_finite = code == 1 and "not finite" in reason
        figures = summary(folder) if (folder / DONE).exists() or not_finite else {}
        course = figures.get("course", [])
        failed = not_finite or (code == 0 and bool(course) and course[-1][1] is None)
        if not failed and (code != 0 or figures.get("loss") is None):
            raise RunFailedError(f"{run.label}: exited with code {code} without a loss: {reason}")
        if self._facts(run) != facts:
            raise RunFailedError(f"{run.label}: the data changed during the run")
        facts["versions"] = self.versions
        return Record(key, run.label, run.settings, failed, round(seconds, 1), figures, facts)

    def _run(self, arguments: Sequence[str], log: Path) -> tuple[int, float]:
        """Run pretrain.py in a free place. Return the exit code and the total CPU seconds."""
        place = self._free.get()
        ranks = [] if place.ranks == 1 else ["--ranks", str(place.ranks)]
        try:
            with log.open("w", encoding="utf-8") as console:
                self._logs.append(log)
                process = subprocess.Popen(
                    [sys.executable, str(ROOT / "pretrain.py"), *arguments, *ranks],
                    cwd=ROOT,
                    env={**self.environment, **place.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                )
                _, status, usage = os.wait4(process.pid, 0)
        finally:
            if log in self._logs:
                self._logs.remove(log)
            self._free.put(place)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        """Cancel queued runs and wait for the runs in progress."""
        self._pool.shutdown(cancel_futures=True)


def summary(folder: Path) -> dict[str, Any]:
    """Return the results of a run: the final validation loss averaged over the datasets, the final
    loss of each dataset, the number of training tokens, and the averaged validation losses by step.

    Losses are in nats per token. Losses that are not finite are None.
    """
    metrics = read_metrics(folder)
    validated = [line for line in metrics if "val/loss" in line]
    last = validated[-1] if validated else {}
    return {
        "loss": last.get("val/loss"),
        "datasets": {
            key.split("/")[1]: loss for key, loss in last.items() if fnmatch(key, "val/*/loss")
        },
        "tokens": max((line.get("progress/tokens", 0) for line in metrics), default=0),
        "course": [[line["step"], line["val/loss"]] for line in validated],
    }


def message(log: Path) -> str:
    """Return the first line of the last error in a run's log, or the last line if there is no
    error."""
    lines = lines_of(log) or ["nothing"]
    # Commands prefix every line of an error.
    groups = groupby(lines, lambda line: line.startswith("error: "))
    errors = [list(group) for error, group in groups if error]
    return errors[-1][0] if errors else lines[-1]


def lines_of(log: Path) -> list[str]:
    """Return the lines of a log, which may be truncated in mid-character."""
    return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
