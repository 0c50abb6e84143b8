"""What a run reports: logs, monitors, validation."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from models.section import Section, at_least, ignored, positive


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Section):
    """What Weights & Biases calls the run, if `log.trackers` has wandb."""

    project: str = "spectrain"
    """Its project."""
    entity: str | None = None
    """The user or team; null = your default."""
    group: str | None = None
    """Runs with the same group are shown together."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""
    mode: Literal["online", "offline"] | None = None
    """Send at once, or write to the run folder for `wandb sync`; null = what WANDB_MODE says."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """How often and where to the run reports."""

    interval: int = 10
    """Steps between console lines and entries in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Where the same metrics go as well; what fails there never stops the run."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """What Weights & Biases calls the run, if `log.trackers` has wandb."""

    def problems(self) -> Iterator[str]:
        """What is wrong with logging."""
        yield from at_least(self, 1, "interval")
        if "wandb" not in self.trackers:
            keys = (each.name for each in fields(self.wandb))
            yield from ignored(self.wandb, *keys, when="unless trackers has wandb", prefix="wandb.")


MonitorGroup = Literal["weights", "gradients", "updates", "noise", "activations", "attention"]
"""Kinds of figures that docs/monitors.md describes."""


@dataclass(frozen=True, kw_only=True)
class MonitorsConfig(Section):
    """What is looked at in weights, gradients, updates and activations, for monitors.jsonl."""

    interval: int = 100
    """Steps between the steps that are looked at; 0 = none."""
    groups: tuple[MonitorGroup, ...] = (
        "weights", "gradients", "updates", "activations", "attention",
    )  # fmt: skip
    """What is looked at; what the update rules report is always part of it. Noise is not in it by
    default: it keeps the gradients of `noise_samples` micro-batches and the weights of as many
    steps."""
    activation_gib: float = 2.0
    """Room on a rank for the Gram matrices of activations, in GiB; layers take turns if it is too
    little for all."""
    noise_samples: int = 8
    """Micro-batches of a step, its first ones, whose gradients are compared, and successive steps
    whose updates are."""

    def problems(self) -> Iterator[str]:
        """What is wrong with monitoring."""
        yield from at_least(self, 0, "interval")
        yield from at_least(self, 2, "noise_samples")
        yield from positive(self, "activation_gib")
        if "noise" not in self.groups:
            yield from ignored(self, "noise_samples", when="unless groups has noise")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Section):
    """How often and on how much the run is validated."""

    interval: int = 0
    """Steps between validations; the last step is always followed by one, with 0 only that."""
    samples: int | None = None
    """Sequences per set and validation; null = the whole set."""

    def problems(self) -> Iterator[str]:
        """What is wrong with validation."""
        yield from at_least(self, 0, "interval")
        yield from at_least(self, 1, "samples")
