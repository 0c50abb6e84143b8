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
    """Device to train on: cuda is a GPU per rank, cpu processors, auto a GPU per rank where there
    are GPUs. An NVIDIA device that does not start is an error under auto as well."""
    deterministic: bool = False
    """Take only kernels whose results repeat to the bit on a GPU, which makes the backward pass of
    attention slower. A warning names an operation that has none."""

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the folder: nothing replaces a `~` by a home."""
        if not self.dir or self.dir.startswith("~"):
            yield f"dir must be the path of a folder, not empty and without ~, got {self.dir!r}"


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Section):
    """The machine that the run is meant for; a run on another one is the same."""

    gpus: Count | None = None
    """GPUs that `--dry-run` plans for without `--gpus`; null = as few as the layout takes."""
    device: str = "h100"
    """GPU that `--dry-run` plans for without `--device`: h100, h200, a100, b200, or a YAML file
    with the figures of another one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the run saves checkpoints, and what it may continue from."""

    interval: Whole = 1000
    """Steps between checkpoints; a run that ends or is stopped also saves one. 0 never saves."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, which takes host memory for one more copy."""
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

    heartbeat_seconds: Seconds = 10.0
    """Seconds between updates of `heartbeat.json` in the run folder."""
    hang_seconds: Seconds | None = 300.0
    """Seconds without progress after which every rank writes its stack traces to `stacks/`, at most
    half of `parallel.timeout_seconds`; null never writes them."""
    replica_interval: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps between checks that nothing but steps has changed a weight, and that all copies of each
    are equal. Checkpoints are checked too, before they are saved; what is found ends the run. Each
    step reads all weights twice and waits for new ones. 0 never checks."""


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
