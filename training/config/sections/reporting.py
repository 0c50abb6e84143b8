"""The sections of a run config about what it reports: log, monitors and validation."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from models.section import Count, Positive, Section, Whole


class WandbConfig(Section):
    """How the run appears in Weights & Biases, if `log.trackers` has wandb.

    Team, group, tags and mode are those of its environment variables, such as WANDB_ENTITY.
    """

    project: str = "spectrain"
    """Project of the run."""


class LogConfig(Section):
    """How often the run reports, and where."""

    interval: Count = 10
    """Steps between console lines and entries in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Services that get the same metrics. A tracker that fails never stops the run."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """How the run appears in Weights & Biases, if `log.trackers` has wandb. Its environment
    variables, such as WANDB_ENTITY, WANDB_TAGS and WANDB_MODE, say the rest."""


MonitorGroup = Literal["weights", "gradients", "updates", "noise", "activations", "attention"]
"""Groups of figures that docs/monitors.md describes."""


class MonitorsConfig(Section):
    """What monitors measure of weights, gradients, updates and activations, for monitors.jsonl."""

    interval: Whole = 100
    """Steps between monitored steps; 0 turns monitors off."""
    groups: tuple[MonitorGroup, ...] = (
        "weights", "gradients", "updates", "activations", "attention",
    )  # fmt: skip
    """Groups of figures to compute, besides those that rules report. noise is off by default: it
    keeps the gradients of `noise_samples` micro-batches and the weights of as many steps."""
    activation_gib: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """GiB per rank for the Gram matrices of activations; if they do not fit, monitored steps take
    the layers in turn."""
    inspection_gib: Positive = 4.0
    """GiB per rank for the matrices that are gathered at once; those that do not fit are inspected
    in turn. A single matrix may take more."""
    noise_samples: Annotated[int, Field(ge=2, le=4096)] = 8
    """Samples for noise figures: the first micro-batches of a monitored step, and the last steps up
    to it."""


class ValidationConfig(Section):
    """How often the run is validated, and on how many sequences."""

    interval: Whole = 0
    """Steps between validations, besides the one after the last step; 0 has only that one."""
    samples: Count | None = None
    """Sequences of each set per validation; null = the whole set."""
    samples_interval: Whole = 0
    """Steps between samples of text: the most probable continuation of each set's first tokens, in
    metrics.jsonl and on the run's page. 0 writes none."""
    samples_tokens: Count = 32
    """Tokens of a continuation; each costs a forward pass of one sequence per set."""

    @staticmethod
    def prompt_tokens(sequence_length: int) -> int:
        """Return the number of tokens that a sample of text continues."""
        return min(16, sequence_length // 2)
