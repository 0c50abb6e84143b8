"""Where metrics go beside metrics.jsonl and the console: Weights & Biases, TensorBoard.

None of them can stop a run: one that is missing or fails is left out from then on, with one line on
the console. The reporting rank has them.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from omegaconf import OmegaConf

from training.config import Config, to_yaml

Metrics = Mapping[str, float | int | str | None]


class Tracker(Protocol):
    """Something that takes the metrics of a step, once per step, in order."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Take what was measured of `step`."""

    def close(self) -> None:
        """Write what is left."""


class WandbTracker:
    """A run of Weights & Biases, with the run's own id, so that a continued run is the same one.

    Steps are a metric of their own, `progress/step`: the service refuses to go back to a step, and
    a run that continues from a checkpoint takes some again.
    """

    def __init__(self, config: Config, run_id: str) -> None:
        import wandb

        section = config.log.wandb
        self.run = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            tags=list(section.tags),
            name=config.run.name,
            id=run_id,
            resume="allow",
            mode=section.mode,
            dir=config.run.dir,
            config=cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(to_yaml(config)))),
        )
        self.run.define_metric("progress/step")
        self.run.define_metric("*", step_metric="progress/step")

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Take what was measured of `step`."""
        known = {name: value for name, value in metrics.items() if value is not None}
        self.run.log({**known, "progress/step": step})

    def close(self) -> None:
        """Wait until all is sent, or in offline mode written."""
        self.run.finish()


class TensorBoardTracker:
    """Event files in the folder `tensorboard` of the run; later steps of an earlier start of the
    run are hidden."""

    def __init__(self, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.fspath(Path(config.run.dir) / "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Take the numbers that were measured of `step`."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class Trackers:
    """Those that a config names, while they work."""

    def __init__(self, config: Config, *, run_id: str, step: int) -> None:
        """`step` is the one that the run continues after."""
        makers: dict[str, Callable[[], Tracker]] = {
            "wandb": lambda: WandbTracker(config, run_id),
            "tensorboard": lambda: TensorBoardTracker(config, step),
        }
        self.working: dict[str, Tracker] = {}
        for name in config.log.trackers:
            self._try(name, partial(self._start, name, makers[name]))

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        self.working[name] = make()

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Hand the metrics of `step` to each."""
        for name, tracker in list(self.working.items()):
            self._try(name, partial(tracker.log, metrics, step=step))

    def close(self) -> None:
        """End each."""
        for name, tracker in list(self.working.items()):
            self._try(name, tracker.close)
        self.working.clear()

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        # Whatever a service, a disk or a package does wrong: training is worth more.
        try:
            action()
        except ImportError as error:
            self._drop(name, f"{error}: install the extra `{name}`")
        except Exception as error:
            self._drop(name, str(error).strip() or type(error).__name__)

    def _drop(self, name: str, reason: str) -> None:
        self.working.pop(name, None)
        print(f"warning: {name} is no longer told: {reason.splitlines()[0]}", flush=True)
