"""What a run leaves in its folder and says on the console; the reporting rank has one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from parallel.optimizer.routing import Route
from training.config import Config, to_yaml
from training.data.order import TrainingData
from training.lifecycle.run_folder import mark_done
from training.loop import Outcome
from training.report.metrics import MetricsWriter, console_line
from training.report.trackers import Trackers

EVENTS_FILE: Final = "events.jsonl"


class RunLog:
    """The folder `run.dir`: config.yaml (resolved), routing.jsonl (one line per unit), data.json
    (fingerprint and use of every set), metrics.jsonl (one line per logged step) and monitors.jsonl
    (one per step that monitors looked at).

    A run that continues goes on in the last two, without the lines of steps that are taken again.
    Those of an earlier run in the same folder are kept as metrics.1.jsonl and so on. events.jsonl
    has what happened to the run, a line each: when, after which step, what kind, in words.
    """

    def __init__(
        self,
        config: Config,
        routes: Sequence[Route],
        data: TrainingData,
        step: int = 0,
        counted: Mapping[str, float] | None = None,
        run_id: str = "",
        monitored: int = 0,
    ) -> None:
        """`step` is the one that the run continues after, `counted` what was warned of before it,
        as `SpectralMetrics.state` gives it, `run_id` the name that trackers know the run by,
        `monitored` the last step whose monitors are written: `step`, or the next, if only its
        report is still to be made."""
        self.config = config
        folder = Path(config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name, last in (("metrics.jsonl", step), ("monitors.jsonl", monitored)):
            if last == 0:
                set_aside(folder / name)
            else:
                drop_later_lines(folder / name, last)
        self.events = folder / EVENTS_FILE
        if step == 0:
            set_aside(self.events)
        (folder / "config.yaml").write_text(to_yaml(config))
        lines = [json.dumps(asdict(row)) + "\n" for row in routes]
        (folder / "routing.jsonl").write_text("".join(lines))
        used = data.describe(config.train.steps * config.train.global_batch)
        facts = {"fingerprint": data.fingerprint(), "sets": [asdict(use) for use in used]}
        (folder / "data.json").write_text(json.dumps(facts, indent=2) + "\n")
        for use in used:
            print(f"data {use}", flush=True)
        self.writer = MetricsWriter(folder)
        self.monitors: MetricsWriter | None = None
        self.trackers = Trackers(config, run_id=run_id, step=step)
        self.note("continued" if step else "started", step, "")
        counted = counted or {}
        self.unconverged = counted.get("unconverged", 0.0)
        self.outside = int(counted.get("outside", 0))

    def note(self, kind: str, step: int, text: str) -> None:
        """Print `text`, unless it is empty, and keeps it as an event after `step`."""
        if text:
            print(text, flush=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"time": now, "step": step, "kind": kind, "text": text}
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def report(self, metrics: dict[str, Any], step: int) -> None:
        """Write one step's metrics and prints what a person watches."""
        self.writer.log(metrics, step=step)
        self.trackers.log(metrics, step=step)
        if "train/loss" in metrics:
            print(console_line(metrics, step=step, total_steps=self.config.train.steps), flush=True)
        if step == 1 and "penalty/loss_ratio" in metrics:
            self.note(
                "penalty",
                step,
                f"the Gram penalty is {metrics['penalty/loss_ratio']:.3g} of the loss of step 0, "
                f"its gradient {metrics['penalty/gradient_ratio']:.3g} of the loss's",
            )
        if "penalty/switched" in metrics:
            way = "on" if metrics["penalty/switched"] > 0 else "off"
            level = f"{metrics['penalty/level']:.3g}"
            self.note("penalty", step, f"the Gram penalty is switched {way}, at {level}")
        new = metrics.get("spectral/unconverged", 0.0) - self.unconverged
        if new > 0:
            self.unconverged += new
            self.note(
                "warning",
                step,
                f"warning: {new:.0f} multiplier solves since the last line ended above tolerance, "
                f"largest |f| of this step {metrics['spectral/residual/max']:.1e}",
            )
        outside = metrics.get("pc/domain/outside", 0) - self.outside
        if outside > 0:
            self.outside += outside
            self.note(
                "warning",
                step,
                f"warning: the tracked norm of {outside} PC units was off, largest normalised "
                f"singular value {metrics['pc/domain/max']:.3f}; corrected",
            )
        losses = [
            f"{name.split('/')[1]} {value:.4f}"
            for name, value in metrics.items()
            if name.startswith("val/") and name.count("/") == 2 and name.endswith("/loss")
        ]
        if losses:
            print(f"step {step} validation loss: {', '.join(losses)}", flush=True)

    def record(self, line: dict[str, Any], step: int) -> None:
        """Write what monitors saw in one step."""
        if self.monitors is None:
            self.monitors = MetricsWriter(self.config.run.dir, "monitors.jsonl")
        self.monitors.log(line, step=step)

    def go_back(self, step: int, text: str) -> None:
        """Forget the lines of steps after `step`, which are taken again; `text` says why."""
        self.note("went back", step, text)
        self._close_files()
        drop_later_lines(self.writer.path, step)
        drop_later_lines(self.writer.path.with_name("monitors.jsonl"), step)
        self.writer, self.monitors = MetricsWriter(self.config.run.dir), None

    def _close_files(self) -> None:
        self.writer.close()
        if self.monitors is not None:
            self.monitors.close()

    def close(self) -> None:
        """Close the files and ends the trackers, however the run ended."""
        self._close_files()
        self.trackers.close()

    def conclude(self, outcome: Outcome, comparison: Sequence[tuple[str, float, float]]) -> None:
        """Print how the run ended, each set's loss beside its unigram entropy; makes DONE if
        it has taken its last step."""
        steps, folder = self.config.train.steps, self.config.run.dir
        if outcome.stopped is not None:
            text = f"step {outcome.step} of {steps}, as {outcome.stopped}; {self.advice()}"
            self.note("stopped", outcome.step, f"stopped: {text}")
            return
        for name, loss, entropy in comparison:
            verdict = "below" if loss < entropy else "NOT below"
            print(f"val/{name}/loss {loss:.4f} is {verdict} its unigram entropy {entropy:.4f}")
        mark_done(folder, outcome.step >= steps)
        text = f"done: step {outcome.step} of {steps}, output in {folder}"
        self.note("done", outcome.step, text)

    def advice(self) -> str:
        """How to go on with a run that stopped."""
        if self.config.checkpoint.interval == 0:
            return "nothing is saved, as checkpoint.interval is 0"
        return "the same command continues it"


def drop_later_lines(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, and what is no whole line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def set_aside(path: Path) -> None:
    """Rename a non-empty file to the first free `name.N.suffix`."""
    if path.exists() and path.stat().st_size:
        names = (path.with_suffix(f".{n}{path.suffix}") for n in count(1))
        path.rename(next(name for name in names if not name.exists()))
