"""Metric trackers: Weights & Biases and TensorBoard.

A tracker never stops a run. If a tracker is not installed or fails, it is dropped with a warning,
which is repeated at the end of the run. Trackers run on rank 0 only.
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
    """Receives the metrics of each logged step, in order."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Record the metrics of `step`."""

    def close(self) -> None:
        """Flush remaining metrics."""


class WandbTracker:
    """Logs to Weights & Biases under the run id. A resumed run keeps its id.

    The step is logged as a separate metric, `progress/step`: a run resumed from a checkpoint
    repeats some steps, but wandb rejects a step that is lower than the last step. An offline run
    writes a new folder at each start. If several folders of a run are uploaded with `wandb sync`,
    only the data of the last folder remains. Each folder therefore also contains all earlier steps.
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
        # Substitutes for the package may lack this property.
        offline = os.environ.get("WANDB_MODE") == "offline" or getattr(self.run, "offline", False)
        if offline and step > 0:
            text = f"wandb is offline: also writing steps up to {step} to wandb's new folder"
            print(text, flush=True)
            for line in read_metrics(config.run.dir):
                if line["step"] <= step:
                    self.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Log the metrics of `step` that are not None."""
        logged = {name: value for name, value in metrics.items() if value is not None}
        self.run.log({**logged, "progress/step": step})

    def close(self) -> None:
        """Wait until all metrics are uploaded or, in offline mode, written to disk."""
        self.run.finish()


def tag(name: str) -> str:
    """Return the TensorBoard name of a metric: `monitor_rms/mlp` for `monitor/rms/mlp`.

    TensorBoard groups metrics by the first part of their names. Most metrics come from monitors, so
    each monitor metric gets its own group.
    """
    return re.sub(r"^monitor/(?=[^/]+/)", "monitor_", name)


class TensorBoardTracker:
    """Writes event files to the subfolder `tensorboard` of the run folder.

    When a run resumes, events that were logged after the checkpoint are hidden.
    """

    def __init__(self, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.fspath(Path(config.run.dir) / "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Log the metrics of `step` that are numbers or text."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(tag(name), value, step)
            elif isinstance(value, str):
                self.writer.add_text(tag(name), value, step)

    def close(self) -> None:
        """Flush remaining metrics."""
        self.writer.close()


class Trackers:
    """The trackers that are enabled in the config and have not failed.

    Attributes:
        dropped: warnings about dropped trackers.
    """

    def __init__(
        self, config: Config, *, run_id: str, step: int, warn: Callable[[int, str], None]
    ) -> None:
        """Start the trackers of a run that resumes after `step`; `warn` is called with a step and a
        message."""
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
        """Context manager that drops the tracker after any error of its service, its package or the
        disk."""
        try:
            yield
        except Exception as error:
            self.working.pop(name, None)
            advice = f": pip install {name}" if isinstance(error, ImportError) else ""
            reason = first_line(error)
            self.dropped.append(f"warning: no longer logging to {name}: {reason}{advice}")
            self.warn(self.step, self.dropped[-1])
