"""Where a run lies, when it is saved and stopped, and what watches over it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from models.section import Section, at_least, positive

Kind = Literal["data", "tokenizer", "model", "optimizer", "schedule", "train"]
"""What a run is known by; see training/checkpoint/identity.py."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """What the run is called and where its output goes."""

    name: str
    """Name of the run, in logs and trackers."""
    dir: str
    """Folder that all output of the run lies in."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What ranks train on: a GPU each (cuda), processors (cpu), or a GPU each where there is one
    (auto). An NVIDIA device that does not start is an error under auto as well."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the run is saved, and what it may be continued with."""

    interval: int = 1000
    """Steps between checkpoints; the end of a run and a stop are saved too. 0 = never save."""
    asynchronous: bool = True
    """Go on training while a checkpoint is written; it then takes memory for one more copy."""
    keep_last: int | None = 3
    """The newest checkpoints that are kept; null = all."""
    keep_every: int | None = None
    """Keep checkpoints of steps that are multiples of this as well; null = only the newest."""
    allow_change: tuple[Kind, ...] = ()
    """What may differ from the checkpoint that the run continues; else a change is refused."""
    initialize_from: str | None = None
    """Run folder or checkpoint, of any layout, whose weights a run begins with that has nothing to
    continue; its PC layers become plain weights. Nothing else is taken. null = new weights."""

    def problems(self) -> Iterator[str]:
        """What is wrong with checkpointing."""
        yield from at_least(self, 0, "interval")
        yield from at_least(self, 1, "keep_last", "keep_every")


@dataclass(frozen=True, kw_only=True)
class StopConfig(Section):
    """When a run saves and ends before its last step, to be continued by the same command."""

    slurm_margin_seconds: float | None = 600.0
    """Stop so long before the end of the SLURM job; null = pay no attention to it."""

    def problems(self) -> Iterator[str]:
        """What is wrong with stopping early."""
        yield from at_least(self, 0, "slurm_margin_seconds")


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Section):
    """How a run shows that it is alive, or where it hangs."""

    heartbeat_seconds: float = 10.0
    """Seconds between updates of the file `heartbeat.json` in the run folder."""
    hang_seconds: float | None = 300.0
    """Write every rank's stacks to `stacks/` when nothing moved for so long; null = never."""

    def problems(self) -> Iterator[str]:
        """What is wrong with watching the run."""
        yield from positive(self, "heartbeat_seconds", "hang_seconds")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig(Section):
    """What happens when the loss jumps, or too many steps in a row have to be skipped."""

    deviations: float | None = None
    """Skip a step whose loss is so many standard deviations above the last losses' mean; null =
    skip only what is not finite."""
    window: int = 128
    """How many last losses a loss is compared with; before there are so many, none is skipped."""
    rewinds: int = 0
    """How often the run goes back to its last checkpoint, leaving out the skipped steps' samples,
    instead of stopping after `train.max_skipped_steps`."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the policy for spikes."""
        yield from positive(self, "deviations")
        yield from at_least(self, 2, "window")
        yield from at_least(self, 0, "rewinds")
