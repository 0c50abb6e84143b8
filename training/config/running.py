"""The sections of the run config about running it: schedule, saving, stopping, reporting."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["data", "tokenizer", "model", "optimizer", "schedule", "train"]
"""What a run is known by; see training/checkpoint/identity.py."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the run is called and where its output goes."""

    name: str
    """Name of the run, in logs and trackers."""
    dir: str
    """Folder that all output of the run lies in."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a factor on every group's peak."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warm-up, stable, decay) is constant, then falls linearly."""
    warmup_steps: int = 0
    """Steps over which the factor rises linearly to 1."""
    min_ratio: float = 0.1
    """Factor at the end of the run (for all kinds but constant)."""
    cooldown_fraction: float = 0.2
    """Share of the run over which wsd falls."""

    def cooldown_steps(self, total_steps: int) -> int:
        """Steps over which wsd falls, of a run of `total_steps`."""
        return round(self.cooldown_fraction * total_steps)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
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


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """When a run saves and ends before its last step, to be continued by the same command."""

    slurm_margin_seconds: float | None = 600.0
    """Stop so long before the end of the SLURM job; null = pay no attention to it."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How a run shows that it is alive, or where it hangs."""

    heartbeat_seconds: float = 10.0
    """Seconds between updates of the file `heartbeat.json` in the run folder."""
    hang_seconds: float | None = 300.0
    """Write every rank's stacks to `stacks/` when nothing moved for so long; null = never."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What happens when the loss jumps, or too many steps in a row have to be skipped."""

    deviations: float | None = None
    """Skip a step whose loss is so many standard deviations above the last losses' mean; null =
    skip only what is not finite."""
    window: int = 128
    """How many last losses a loss is compared with; before there are so many, none is skipped."""
    rewinds: int = 0
    """How often the run goes back to its last checkpoint, leaving out the skipped steps' samples,
    instead of stopping after `train.max_skipped_steps`."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
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
class LogConfig:
    """How often and where to the run reports."""

    interval: int = 10
    """Steps between console lines and entries in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Where the same metrics go as well; what fails there never stops the run."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """What Weights & Biases calls the run, if `log.trackers` has wandb."""


@dataclass(frozen=True, kw_only=True)
class AutoRuleConfig:
    """When a matrix takes its steps from its spectral rule and when from AdamW: as the nuclear rank
    of its gradient is above the stable rank of its inputs, or below."""

    lr: float
    """Peak learning rate under AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay under AdamW."""
    interval: int = 20
    """Steps between measurements."""
    smoothing: float = 0.9
    """Weight of earlier measurements in the mean of the ratio's logarithm, in [0, 1)."""
    hysteresis: float = 0.1
    """Change to the spectral rule at a ratio of 1 + this, and back at 1 / (1 + this)."""


MonitorGroup = Literal["weights", "gradients", "updates", "noise", "activations", "attention"]
"""Kinds of figures that docs/monitors.md describes."""


@dataclass(frozen=True, kw_only=True)
class MonitorsConfig:
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


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How often and on how much the run is validated."""

    interval: int = 0
    """Steps between validations; the last step is always followed by one, with 0 only that."""
    samples: int | None = None
    """Sequences per set and validation; null = the whole set."""
