"""The sections of a run config about its folder, saving, stopping, supervision and loss spikes."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from models.section import Check, Count, Positive, Section, Whole

Seconds = Annotated[float, Field(gt=0, le=1e7)]

Kind = Literal["data", "tokenizer", "model", "optimizer", "schedule", "train"]
"""Parts of a run's identity; see training/checkpoint/identity.py."""


class RunConfig(Section):
    """Name of the run, and where its output goes."""

    name: str
    """Name of the run in logs and trackers."""
    dir: str
    """Folder for all output of the run."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on: cuda uses one GPU per rank, cpu none, auto uses GPUs if there are any,
    and fails on one that does not start."""
    deterministic: bool = False
    """Use only GPU kernels that repeat bit for bit, which slows the backward pass of attention. A
    warning names each operation without such a kernel."""

    def checks(self) -> Iterator[Check]:
        """Check the folder: nothing replaces a `~` by a home."""
        wrong = not self.dir or self.dir.startswith("~")
        yield "dir", wrong, "must be the path of a folder, not empty and without ~"


class PlanConfig(Section):
    """The machine to plan for; it does not change the run."""

    gpus: Count | None = None
    """GPUs that `--dry-run` plans for without `--gpus`; null = the fewest the layout needs."""
    device: str = "h100"
    """GPU that `--dry-run` plans for without `--device`: h100, h200, a100, b200, or a YAML file of
    figures."""


class CheckpointConfig(Section):
    """When the run saves checkpoints, and what it may continue from."""

    interval: Whole = 1000
    """Steps between checkpoints; a run that ends or is stopped also saves one. 0 never saves."""
    keep_last: Count | None = 3
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: Count | None = None
    """Also keep checkpoints whose step is a multiple of this; null keeps only the newest."""
    allow_change: tuple[Kind, ...] = ()
    """What may differ from the checkpoint that the run continues; other differences are refused.
    `tokenizer` also lets `initialize_from` name weights of another tokenizer."""
    initialize_from: str | None = None
    """Run folder or checkpoint, of any layout, whose weights a new run starts from; its PC layers
    become plain weights. Its model and tokenizer must be the run's. null initialises weights."""


class StopConfig(Section):
    """When a run saves and stops before its last step; the same command continues it."""

    slurm_margin_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = 600.0
    """Seconds before the SLURM time limit at which to save and stop; null ignores the limit."""


class WatchdogConfig(Section):
    """How a run shows that it is alive, and where it hangs."""

    hang_seconds: Seconds | None = 300.0
    """Seconds without progress after which every rank writes its stack to `stacks/`, at most half
    of `parallel.timeout_seconds`; null never does."""
    replica_interval: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps between checks that only steps change weights and that all their copies are equal; a
    difference ends the run. Costs two reads of all weights per step, and a wait for new ones. 0
    never checks."""


class SpikeConfig(Section):
    """What happens when the loss spikes, or when too many consecutive steps are skipped."""

    deviations: Positive | None = None
    """Skip a step whose loss is this many standard deviations above the mean of the last `window`
    losses; null skips only non-finite losses and gradients."""
    window: Annotated[int, Field(ge=2, le=10**6)] = 128
    """Number of past losses to compare with; before that many, no loss is a spike."""
    rewinds: Whole = 0
    """How many times the run may go back to its last checkpoint and leave out the skipped samples,
    instead of ending after `train.max_skipped_steps`."""
