"""Log a run to its folder and the console."""

import contextlib
import json
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from parallel.comm.collectives import CollectiveError
from parallel.disk import replace_file
from parallel.optimizer.routing import Route
from training.checkpoint.identity import contents_of
from training.config import to_yaml
from training.config.schedule import TrainConfig
from training.data.order import Counts, Progress, SetUse, TrainingData, repeats
from training.lifecycle.run_folder import mark_done
from training.loop import Outcome
from training.report.console import console_line, next_commands, sample_lines, validation_lines
from training.report.log_lines import LogFile, MetricsWriter, drop_later_lines
from training.report.trackers import Trackers
from training.step import Trainer

EVENTS_FILE: Final = "events.jsonl"


def final_counts(data: TrainingData, train: TrainConfig, progress: Progress) -> Counts:
    """Return the counts of each set at the end of a run that resumes from `progress`."""
    step, tokens, sample = progress.step, progress.tokens, progress.sample
    present = data.at(step).since(progress.phase)
    for start, mixture in data.later:
        if start > step:
            new = train.samples(step, tokens, start)
            step, tokens, sample = start, tokens + new * train.sequence_length, sample + new
            present = mixture.since(mixture.phase_after(sample, present.read(sample)))
    return present.read(sample + train.samples(step, tokens))


class RunLog:
    """Writes the logs in the run folder and prints console lines, on rank 0.

    config.yaml     the resolved config
    routing.jsonl   one line per unit
    data.json       fingerprint, hashes, use of each token set over the whole run, first sample of
                    the current mixture, and tokens read from removed sets
    metrics.jsonl   one line per logged step
    monitors.jsonl  one line per monitored step
    events.jsonl    one line per event: time, preceding step, kind and text

    A resumed run removes the lines of steps that it will repeat, and then appends to the files.
    Files left in the folder by an earlier run or by the user are renamed to metrics.1.jsonl,
    config.1.yaml, data.1.json and so on.
    """

    def __init__(
        self,
        trainer: Trainer,
        routes: Sequence[Route],
        warned: Mapping[str, float],
        facts: Mapping[str, Any],
    ) -> None:
        """Open the logs of a run that continues from the trainer's progress.

        routes  routing table
        warned  number of warnings already reported, as returned by `SpectralMetrics.state`
        facts   facts about the run, as returned by `run_facts`
        """
        config, progress = trainer.config, trainer.progress
        self.config, self.data, self.validation = config, trainer.data, trainer.validation
        folder = Path(config.run.dir)
        # The last step may still have to be reported.
        step = progress.step - bool(progress.unreported)
        damaged, moved = [], []
        for name, last in (("metrics.jsonl", step), ("monitors.jsonl", progress.step)):
            if last == 0:
                moved += set_aside(folder / name)
            elif count := drop_later_lines(folder / name, last):
                damaged.append(f"dropped {count} damaged lines from {name}")
        used = trainer.present.describe(final_counts(trainer.data, config.train, progress))
        content = data_facts(trainer, used, contents_of(facts["identity"]))
        files = {"config.yaml": to_yaml(config), "data.json": json.dumps(content, indent=2) + "\n"}
        if step == 0:
            moved += set_aside(folder / EVENTS_FILE)
            for name, text in files.items():
                moved += set_aside(folder / name, unless=text)
        if moved:
            print(f"starting at step 0; renamed existing files: {', '.join(moved)}")
        self.events = LogFile(folder / EVENTS_FILE)
        files["routing.jsonl"] = "".join(json.dumps(asdict(row)) + "\n" for row in routes)
        for name, text in files.items():
            replace_file(folder / name, text)
        for text in data_lines(trainer.data, used, content["earlier"]):
            print(f"data {text}", flush=True)
        self.metrics = MetricsWriter(folder)
        self.metrics.flush()  # creates the file
        self.monitors = MetricsWriter(folder, "monitors.jsonl")
        intervals = {"metrics": config.log.interval, "monitors": trainer.monitors.interval}
        kind = "continued" if step else "started"
        self.events.append(event(kind, step, "", intervals=intervals))
        warn = partial(self.note, "warning")
        self.trackers = Trackers(config, run_id=facts["tracker_id"], step=step, warn=warn)
        for text in damaged:
            self.note("warning", step, text)
        self.warned = dict(warned)
        self.rewritten: set[str] = set()

    def note(self, kind: str, step: int, text: str) -> None:
        """Print `text` and record it as an event after `step`."""
        print(text, flush=True)
        self.events.append(event(kind, step, text))

    def report(self, metrics: dict[str, Any], step: int) -> None:
        """Write the metrics of `step` and print its console lines and warnings."""
        self.metrics.log(metrics, step=step)
        self.trackers.log(metrics, step=step)
        if "train/loss" in metrics:
            print(console_line(metrics, step=step, total_steps=self.config.train.steps), flush=True)
        if step == 1 and "penalty/loss_ratio" in metrics:
            self.note(
                "penalty",
                step,
                f"Gram penalty at the first step: {metrics['penalty/loss_ratio']:.3g} times the "
                f"loss; gradient norm: {metrics['penalty/gradient_ratio']:.3g} times that of the "
                "loss",
            )
        for text in (*self._rewritten_sets(), *self._grown_counts(metrics)):
            self.note("warning", step, f"warning: {text}")
        scored = validation_lines(metrics, step, self.config.tasks.files)
        for line in (*scored, *sample_lines(metrics)):
            print(line, flush=True)

    def _rewritten_sets(self) -> Iterator[str]:
        """Yield a warning for each training set whose tokens were modified since the last
        report."""
        for each in self.data.all_sets:
            if each.name not in self.rewritten and each.rewritten:
                self.rewritten.add(each.name)
                text = f"{each.prefix}.bin was modified after the run opened it"
                yield f"{text}: later samples may contain different tokens"

    def _grown_counts(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """Yield a warning for each count in `WARNINGS` that has grown since the last report."""
        prefix, largest = "optim/refused/", metrics.get("pc/domain/max", 0.0)
        units = [
            f"{name.removeprefix(prefix)} {count:.0f}"
            for name, count in metrics.items()
            if name.startswith(prefix)
        ]
        for name, (metric, words) in WARNINGS.items():
            new = metrics.get(metric, 0) - self.warned.get(name, 0)
            if new > 0:
                self.warned[name] = metrics[metric]
                yield words.format(new=new, units=", ".join(units), largest=largest)

    def record(self, line: dict[str, Any], step: int) -> None:
        """Write the monitors' metrics for `step`."""
        self.monitors.log(line, step=step)

    def rewind(self, step: int, text: str) -> None:
        """Drop the lines of all steps after `step`, because the run will repeat these steps. `text`
        gives the reason for the rewind."""
        self.note("rewind", step, text)
        for log in (self.metrics, self.monitors):
            log.close()
            drop_later_lines(log.path, step)

    def close(self) -> None:
        """Close the files and trackers after the run has finished or failed."""
        for log in (self.metrics, self.monitors, self.events):
            log.close()
        self.trackers.close()

    def conclude(self, outcome: Outcome, resume: str) -> None:
        """Print the outcome of the run, and mark the run as done if it has reached its last step.

        `resume` is the option with which the run was started.
        """
        steps, folder = self.config.train.steps, self.config.run.dir
        for text in self.trackers.dropped:
            print(text, flush=True)
        if outcome.stopped is not None:
            text = f"stopped by {outcome.stopped} after step {outcome.step} of {steps}"
            command = "the same command" if resume == "latest" else "the command without --resume"
            advice = f"rerun {command} to resume"
            if self.config.checkpoint.interval == 0:
                advice = "the run was not saved, because checkpoint.interval is 0"
            self.note("stopped", outcome.step, f"{text}; {advice}")
            return
        for each in self.validation:
            loss = outcome.validation.get(f"val/{each.name}/loss", math.nan)
            entropy = each.set.unigram_entropy()
            verdict = "below" if loss < entropy else "not yet below"
            print(f"val/{each.name}/loss {loss:.4f} is {verdict} its unigram entropy {entropy:.4f}")
        mark_done(folder, outcome.step >= steps)
        text = f"done: step {outcome.step} of {steps}, output in {folder}"
        self.note("done", outcome.step, text)
        for command in next_commands(self.config):
            print(f"next: {command}", flush=True)


def data_facts(
    trainer: Trainer, used: Sequence[SetUse], contents: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the content of data.json. `used` is the use of each set over the whole run."""
    data, train, progress = trainer.data, trainer.config.train, trainer.progress
    ahead = train.samples(progress.step, progress.tokens)
    phases = [(0, data), *data.later]
    return {
        "fingerprint": data.fingerprint(),
        "contents": contents,
        "tokens": progress.tokens + ahead * train.sequence_length,
        "sets": [asdict(use) for use in used],
        "since": progress.phase.sample,
        "earlier": trainer.present.earlier(),
        "phases": [{"after_steps": start, "shares": part.shares} for start, part in phases],
    }


def data_lines(
    data: TrainingData, used: Sequence[SetUse], earlier: Mapping[str, int]
) -> Iterator[str]:
    """Yield the console lines about the mixture, the use of each set, and removed sets."""
    for start, part in ((0, data), *data.later) if data.later else ():
        shares = ", ".join(f"{name} {share:.1%}" for name, share in part.shares.items())
        yield f"from step {start + 1:,} on: {shares}"
    for use in used:
        yield f"{use.name}: {use.total}" if data.later else str(use)
    if repeated := repeats({use.name: use.epochs for use in used}):
        yield repeated
    for name, tokens in earlier.items():
        yield f"{name}: removed from the mixture after {tokens:,} tokens"


def event(kind: str, step: int, text: str, **facts: Any) -> dict[str, Any]:
    """Return a line of events.jsonl."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"time": now, "step": step, "kind": kind, **facts, "text": text}


def write_failure(run_dir: str, step: int, rank: int, error: Exception) -> None:
    """Write an event about the error that ended the run on this rank. Disk errors are ignored.

    The event contains the type of the error, the rank and the host. If a collective failed, it also
    contains the missing ranks and their hosts. The caller prints the error.
    """
    facts: dict[str, Any] = {
        "error": type(error).__name__, "rank": rank, "host": socket.gethostname()
    }  # fmt: skip
    if isinstance(error, CollectiveError):
        facts["absent"] = [{"rank": rank, "host": host} for rank, host in error.absent.items()]
    line = event("failed", step, str(error) or type(error).__name__, **facts)
    with contextlib.suppress(OSError), (Path(run_dir) / EVENTS_FILE).open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


WARNINGS: Final = {
    "unconverged": (
        "spectral/unconverged",
        "{new:.0f} solves for SSO's multiplier did not reach their tolerance since the last "
        "report; see multiplier_residual in monitors.jsonl",
    ),
    "refused": (
        "optim/refused",
        "{new:.0f} updates were skipped since the last report, because they were not finite or "
        "did not stay bounded: {units}",
    ),
    "outside": (
        "pc/domain/outside",
        "corrected the tracked spectral norm of {new:.0f} PC units; the largest normalised "
        "singular value was {largest:.3f}",
    ),
}
"""Maps each key of `SpectralMetrics.state` to a metric, and to the warning to print when this
metric has grown."""


def set_aside(path: Path, unless: str = "") -> list[str]:
    """Rename a file to the first free `name.N.suffix`, unless its text is `unless`. Return [`OLD to
    NEW`], or [] if no file was renamed."""
    if path.exists() and not _contains(path, unless.encode()):
        names = (path.with_suffix(f".{n}{path.suffix}") for n in count(1))
        new = path.rename(next(name for name in names if not name.exists()))
        return [f"{path.name} to {new.name}"]
    return []


def _contains(path: Path, content: bytes) -> bool:
    """Return whether a file contains exactly `content`."""
    return path.stat().st_size == len(content) and path.read_bytes() == content
