"""Trackers of metrics: Weights & Biases and TensorBoard.

A tracker cannot stop a run. If it is not installed or fails, it is dropped with a warning. The
warning is repeated at the end of the run. Only rank 0 has trackers.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from parallel.error_text import first_line
from training.config import Config
from training.report.log_lines import read_metrics

Metrics = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """Receiver of the metrics of each logged step, in order."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Record the metrics of `step`."""

    def close(self) -> None:
        """Write remaining metrics."""


class WandbTracker:
    """Tracker that writes to Weights & Biases under the run's id, which a continued run keeps.

    The step is a separate metric, `progress/step`, because wandb rejects earlier steps and a run
    that continues from a checkpoint repeats some steps. An offline run writes a new folder at each
    start. `wandb sync` replaces earlier folders with later folders, so a later folder also contains
    the earlier steps.
    """

    def __init__(self, config: Config, run_id: str, step: int) -> None:
        import wandb

        self.run = wandb.init(
            project=config.log.wandb.project,
            name=config.run.name,
            id=run_id,
            resume="allow",
            dir=config.run.dir,
            config=asdict(config),
        )
        self.run.define_metric("progress/step")
        self.run.define_metric("*", step_metric="progress/step")
        # A substitute for the package may not have this property.
        offline = os.environ.get("WANDB_MODE") == "offline" or getattr(self.run, "offline", False)
        if offline and step > 0:
            self.log_again(config.run.dir, step)

    def log_again(self, folder: str, last: int) -> None:
        """Record the steps up to `last` from the run folder."""
        print(
            f"wandb is offline: steps up to {last} are also written to wandb's new folder",
            flush=True,
        )
        for line in read_metrics(folder):
            if line["step"] <= last:
                self.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Record the metrics of `step` that have a value."""
        logged = {name: value for name, value in metrics.items() if value is not None}
        self.run.log({**logged, "progress/step": step})

    def close(self) -> None:
        """Wait until all metrics are uploaded or, in offline mode, written to disk."""
        self.run.finish()


def tag(name: str) -> str:
    """Return a metric's name in TensorBoard: `monitor_rms/mlp` for `monitor/rms/mlp`.

    TensorBoard groups metrics by the first part of their names. Most metrics are from monitors, so
    each monitor metric gets its own group.
    """
    return re.sub(r"^monitor/(?=[^/]+/)", "monitor_", name)


class TensorBoardTracker:
    """Tracker that writes event files to the folder `tensorboard` of the run folder.

    When a run continues, events after its checkpoint are hidden.
    """

    def __init__(self, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.fspath(Path(config.run.dir) / "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Record the metrics of `step` that are numbers or text."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(tag(name), value, step)
            elif isinstance(value, str):
                self.writer.add_text(tag(name), value, step)

    def close(self) -> None:
        """Write remaining metrics."""
        self.writer.close()


class Trackers:
    """The working trackers of a config.

    Attributes:
        dropped: warnings about dropped trackers.
    """

    def __init__(
        self, config: Config, *, run_id: str, step: int, warn: Callable[[int, str], None]
    ) -> None:
        """Start the trackers of a run that continues after `step`; `warn` is called with a step and
        a text."""
        self.step, self.warn = step, warn
        self.dropped: list[str] = []
        makers: dict[str, Callable[[], Tracker]] = {
            "wandb": lambda: WandbTracker(config, run_id, step),
            "tensorboard": lambda: TensorBoardTracker(config, step),
        }
        self.working: dict[str, Tracker] = {}
        for name in config.log.trackers:
            with self._kept(name):
                self.working[name] = makers[name]()

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Pass the metrics of `step` to every tracker."""
        self.step = step
        for name, tracker in list(self.working.items()):
            with self._kept(name):
                tracker.log(metrics, step=step)

    def close(self) -> None:
        """Close every tracker."""
        for name, tracker in list(self.working.items()):
            with self._kept(name):
                tracker.close()
        self.working.clear()

    @contextlib.contextmanager
    def _kept(self, name: str) -> Iterator[None]:
        """Context manager that drops the tracker if a service, disk or package fails."""
        try:
            yield
        except Exception as error:
            self.working.pop(name, None)
            advice = f": pip install {name}" if isinstance(error, ImportError) else ""
            reason = first_line(error)
            self.dropped.append(f"warning: {name} receives no more metrics: {reason}{advice}")
            self.warn(self.step, self.dropped[-1])
