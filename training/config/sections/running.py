"""The sections of a run config about its folder, saving, stopping, supervision and loss spikes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from models.section import Count, Positive, Section, Whole

Seconds = Annotated[float, Field(gt=0, le=1e7)]

Kind = Literal["data", "tokenizer", "model", "optimizer", "schedule", "train"]
"""Parts of a run's identity; see training/checkpoint/identity.py."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Name of the run, and where its output goes."""

    name: str
    """Name of the run in logs and trackers."""
    dir: str
    """Folder for all output of the run."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on: cuda uses one GPU per rank, cpu none, auto uses GPUs if there are any. An
    NVIDIA device that does not start is an error under auto too."""
    deterministic: bool = False
    """Use only GPU kernels that repeat their results bit for bit; the backward pass of attention is
    slower. A warning names each operation without such a kernel."""

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the folder: nothing replaces a `~` by a home."""
        if not self.dir or self.dir.startswith("~"):
            yield f"dir must be the path of a folder, not empty and without ~, got {self.dir!r}"


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Section):
    """The machine to plan for; it does not change the run."""

    gpus: Count | None = None
    """GPUs that `--dry-run` plans for without `--gpus`; null = the fewest the layout needs."""
    device: str = "h100"
    """GPU that `--dry-run` plans for without `--device`: h100, h200, a100, b200, or a YAML file
    with the figures of another one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the run saves checkpoints, and what it may continue from."""

    interval: Whole = 1000
    """Steps between checkpoints; a run that ends or is stopped also saves one. 0 never saves."""
    keep_last: Count | None = 3
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: Count | None = None
    """Also keep checkpoints whose step is a multiple of this; null keeps only the newest."""
    allow_change: tuple[Kind, ...] = ()
    """What may differ between the run and the checkpoint that it continues; any other difference
    is refused. `tokenizer` also allows `initialize_from` one with another tokenizer."""
    initialize_from: str | None = None
    """Run folder or checkpoint, saved on any layout, whose weights a new run starts from; its PC
    layers become plain weights. Nothing else of it is used; its model and, where both are known,
    its tokenizer must be the run's. null initialises weights."""


@dataclass(frozen=True, kw_only=True)
class StopConfig(Section):
    """When a run saves and stops before its last step; the same command continues it."""

    slurm_margin_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = 600.0
    """Seconds before the SLURM time limit at which to save and stop; null ignores the limit."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Section):
    """How a run shows that it is alive, and where it hangs."""

    hang_seconds: Seconds | None = 300.0
    """Seconds without progress after which every rank writes its stack traces to `stacks/`, at most
    half of `parallel.timeout_seconds`; null never writes them."""
    replica_interval: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps between checks that only steps change weights and that all their copies are equal; a
    difference ends the run. Weights are also checked before each save. Costs two reads of all
    weights per step, and a wait for new ones. 0 never checks."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig(Section):
    """What happens when the loss spikes, or when too many consecutive steps are skipped."""

    deviations: Positive | None = None
    """Skip a step whose loss is more than this many standard deviations above the mean of the last
    `window` losses; null skips only non-finite losses and gradients."""
    window: Annotated[int, Field(ge=2, le=10**6)] = 128
    """Number of past losses to compare with; until there are this many, no loss is a spike."""
    rewinds: Whole = 0
    """How many times the run may return to its last checkpoint and leave out the skipped samples,
    instead of aborting after `train.max_skipped_steps`."""
