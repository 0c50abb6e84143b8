"""Trackers of metrics: Weights & Biases and TensorBoard.

None of them can stop a run: one that is not installed or fails is dropped with a warning, which the
end of the run repeats. Only the reporting rank has trackers.
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
from training.report.metrics import read_metrics

Metrics = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """Receiver of metrics, once per step, in order."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Record the metrics of `step`."""

    def close(self) -> None:
        """Write what is left."""


class WandbTracker:
    """Tracker to Weights & Biases, under the run's id, which a continued run keeps.

    The step is a separate metric, `progress/step`: the service refuses earlier steps, and a run
    that continues from a checkpoint takes some steps again. An offline run has a folder for each
    start, and `wandb sync` lets a later one replace those before: it gets the earlier steps again.
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
        # A stand-in of the package may lack the property.
        offline = os.environ.get("WANDB_MODE") == "offline" or getattr(self.run, "offline", False)
        if offline and step > 0:
            self.log_again(config.run.dir, step)

    def log_again(self, folder: str, last: int) -> None:
        """Record the steps up to `last` that the run folder has."""
        print(f"wandb is offline: its new folder gets the steps up to {last} again", flush=True)
        for line in read_metrics(folder):
            if line["step"] <= last:
                self.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Record the metrics of `step` that have a value."""
        logged = {name: value for name, value in metrics.items() if value is not None}
        self.run.log({**logged, "progress/step": step})

    def close(self) -> None:
        """Wait until everything is uploaded, or written in offline mode."""
        self.run.finish()


def tag(name: str) -> str:
    """Return what TensorBoard calls a metric: `monitor_rms/mlp` for `monitor/rms/mlp`.

    It groups by the first part, and most metrics are of the monitors: each figure is a group.
    """
    return re.sub(r"^monitor/(?=[^/]+/)", "monitor_", name)


class TensorBoardTracker:
    """Tracker to event files in the run's folder `tensorboard`.

    A continued run hides the steps after the one that it continues from.
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
        """Write what is left."""
        self.writer.close()


class Trackers:
    """The trackers that a config names, as long as they work.

    Attributes:
        dropped: the warnings of those that do not.
    """

    def __init__(
        self, config: Config, *, run_id: str, step: int, warn: Callable[[int, str], None]
    ) -> None:
        """Start trackers of a run that continues after `step`; `warn` takes a step and a text."""
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
        """Context in which a failure of a service, a disk or a package, of any kind, ends nothing
        but the tracker: training is worth more."""
        try:
            yield
        except Exception as error:
            self.working.pop(name, None)
            advice = f": pip install {name}" if isinstance(error, ImportError) else ""
            reason = first_line(error)
            self.dropped.append(f"warning: {name} no longer gets metrics: {reason}{advice}")
            self.warn(self.step, self.dropped[-1])
