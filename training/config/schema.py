"""The run config and its sections. The docstring under each field is its entry in
docs/configuration.md. Each section validates itself in its `checks` method; cross-section checks
are in checks.py. The data sections are defined in data.py, `train` and `schedule` in schedule.py,
`optimizer` in optimizer_section.py, and `model` in models/. Config, the last class in this file,
contains all sections.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Final, Literal

from pydantic import Field

from models.config import ModelConfig
from models.layout import Layout
from models.pc_config import PCConfig
from models.section import Check, Count, ExactInt, Positive, Section, Whole
from spectral.gram_penalty import Normalize, Side
from spectral.rules import RULES
from training.config.data import DataConfig, TasksConfig, ValidationConfig
from training.config.optimizer_section import OptimizerConfig
from training.config.schedule import ScheduleConfig, TrainConfig
from training.errors import printable
from training.local_path import local_path

Seconds = Annotated[float, Field(gt=0, le=1e7)]

Kind = Literal["data", "tokenizer", "model", "optimizer", "schedule", "train"]
"""Kinds of settings that must not change when a run resumes, unless `checkpoint.allow_change` lists
the kind; see training/checkpoint/identity.py."""


class RunConfig(Section):
    """Name, output folder and device of the run."""

    name: str
    """Run name shown in logs and trackers."""
    dir: str
    """Folder to which the run writes all of its output."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. cuda: one GPU per rank; cpu: no GPU; auto: cuda if the machine has GPUs,
    else cpu. If CUDA fails to initialize on a machine with GPUs, the run exits with an error unless
    device is cpu."""
    deterministic: bool = False
    """Use only deterministic GPU kernels, which slows down the attention backward pass. Operations
    without a deterministic kernel are listed in a warning."""

    def checks(self) -> Iterator[Check]:
        """Check the run name and the folder path. The run name is often part of `dir`, so it must
        be a valid path."""
        bad = {"", ".", ".."}.intersection(part.strip() for part in self.name.split("/"))
        rule = (
            "must consist of names other than '.' and '..', separated by '/', without control "
            "characters"
        )
        yield "name", bad or "\n" in self.name or printable(self.name) != self.name, rule
        yield "dir", not self.dir, "must be a folder path"
        yield local_path("dir", self.dir)


class PlanConfig(Section):
    """Default hardware for plans; has no effect on training."""

    gpus: Count | None = None
    """Number of GPUs assumed by `--dry-run` without `--gpus`; null = the smallest number the
    layout allows."""
    device: str = "h100"
    """GPU type assumed by `--dry-run` without `--device`: h100, h200, a100, b200, or the path of a
    YAML file that describes a GPU."""

    def checks(self) -> Iterator[Check]:
        """Check the device file's path."""
        yield local_path("device", self.device)


class CheckpointConfig(Section):
    """Checkpointing and resuming."""

    interval: Whole = 1000
    """Number of steps between checkpoints; another is saved when the run finishes or is stopped. 0
    disables checkpoints."""
    keep_last: Count | None = 3
    """Number of most recent checkpoints to keep; null keeps all."""
    keep_every: Count | None = None
    """Also keep every checkpoint whose step is a multiple of this number; null keeps only the most
    recent checkpoints."""
    allow_change: tuple[Kind, ...] = ()
    """Kinds of settings that may change when the run resumes from a checkpoint; any other mismatch
    is an error. `tokenizer` also lets `initialize_from` load weights trained with another
    tokenizer."""
    initialize_from: str | None = None
    """Run folder or checkpoint (in any parallel layout) from which a new run loads its initial
    weights; null = random initialisation. The model and tokenizer must match; PC layers are loaded
    as plain weights."""

    def checks(self) -> Iterator[Check]:
        """Check the path of the initial weights."""
        yield local_path("initialize_from", self.initialize_from)


class StopConfig(Section):
    """Stopping before the SLURM time limit. The run saves a checkpoint, from which the same command
    resumes."""

    slurm_margin_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = 600.0
    """Save and stop this many seconds before the SLURM time limit; capped at half the time left
    when the run starts. null ignores the limit."""


class WatchdogConfig(Section):
    """Detection of hung ranks and corrupted weights."""

    hang_seconds: Seconds | None = 300.0
    """Dump every rank's stack trace to `stacks/` after this many seconds without progress; capped
    at half of `parallel.timeout_seconds`. null disables stack dumps."""
    replica_interval: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Number of steps between checks that weights change only in the optimizer step and that all
    replicas are identical; the run ends on a mismatch. If enabled, every step reads all weights
    twice and waits for the new weights. 0 disables the checks."""


class SpikeConfig(Section):
    """Handling of loss spikes and of too many consecutive skipped steps."""

    deviations: Positive | None = None
    """Skip a step whose loss is more than this many standard deviations above the mean of the last
    `window` losses; null skips only steps with a non-finite loss or gradient."""
    window: Annotated[int, Field(ge=2, le=10**6)] = 128
    """Number of past losses used to compute the mean and standard deviation; the first `window`
    losses of a run never count as spikes."""
    rewinds: Whole = 0
    """Maximum number of rewinds: after too many skipped steps, the run rewinds to the last
    checkpoint and skips the offending samples instead of ending."""


class GramPenaltyConfig(Section):
    """Off-diagonal Gram penalty added to the loss. See docs/spectral.md."""

    roles: Annotated[tuple[str, ...], Field(min_length=1)] = ("v", "o", "down")
    """Roles to penalise; each unit is penalised separately."""
    coefficient: Positive | None = None
    """Coefficient of the summed penalties (lambda in the paper); null = the paper's choice: 1e-3 if
    model.hidden is below 1024 (as in the paper's 160M model), else 1e-4."""
    horizon: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Initial fraction of the run during which the penalty is active, in (0, 1]."""
    power: Annotated[Literal[1, 2], ExactInt] = 2
    """2: penalise the squared Frobenius norm of the off-diagonal part of the Gram matrix; 1:
    penalise the norm itself."""
    side: Side = "in"
    """Gram matrix to penalise. in: W^T W (columns); out: W W^T (rows)."""
    normalize: Normalize | None = None
    """Normalization of the squared norm. frobenius: divide by ||W||_F^4; size: divide by n (n - 1);
    null: none."""


Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


class ParallelConfig(Section):
    """Model parallelism. The data-parallel size is the world size divided by `tensor * pipeline *
    context`."""

    tensor: Ranks = 1
    """Tensor-parallel size: number of ranks across which each weight matrix is split."""
    pipeline: Ranks = 1
    """Pipeline-parallel size: number of ranks across which the layers are split."""
    virtual_pipeline: Ranks = 1
    """Number of model chunks per pipeline rank; above 1, the interleaved schedule is used."""
    first_stage_layers: Count | None = None
    """Number of layers in the first pipeline stage, which also holds the embedding; null = as many
    as in the other stages."""
    last_stage_layers: Count | None = None
    """Number of layers in the last pipeline stage, which also holds the output head; null = as many
    as in the other stages."""
    expert: Ranks = 1
    """Expert-parallel size: number of ranks across which each layer's experts are distributed."""
    expert_tensor: Ranks = 1
    """Tensor-parallel size of routed experts, independent of `tensor`."""
    context: Ranks = 1
    """Context-parallel size: number of ranks across which each sequence is split."""
    timeout_seconds: Seconds = 600.0
    """Timeout for collectives, in seconds; when it expires, the run ends with an error."""
    sequence: bool | None = None
    """Sequence parallelism: split norm and residual activations along the sequence across
    tensor-parallel ranks; null = true if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is enabled. If `sequence` is null, the value depends on
        `tensor`."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def layout(self) -> Layout:
        """The size of every parallel axis, and the split of layers into pipeline stages."""
        return Layout(**{axis.name: getattr(self, axis.name) for axis in fields(Layout)})

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def checks(self) -> Iterator[Check]:
        """Check the conditions that do not depend on the model."""
        one_stage, interleaved = self.pipeline == 1, self.virtual_pipeline > 1
        yield "virtual_pipeline", one_stage and interleaved, "requires pipeline > 1"
        for key in ("first_stage_layers", "last_stage_layers"):
            uneven = getattr(self, key) is not None
            yield key, uneven and one_stage, "requires pipeline > 1"
            yield key, uneven and interleaved, "requires virtual_pipeline = 1"
        yield "sequence", self.sequence and self.tensor == 1, "requires tensor > 1"


class WandbConfig(Section):
    """Weights & Biases settings, used if `log.trackers` contains wandb.

    Team, group, tags and mode are set by wandb's environment variables, such as WANDB_ENTITY.
    """

    project: str = "spectrain"
    """wandb project to log to."""


class ProfileConfig(Section):
    """Steps and ranks to profile."""

    first: Count
    """First step to profile, counted from 1. A run's first few steps are slower than the rest."""
    steps: Count = 3
    """Number of steps to profile; for a large model, a trace takes tens of MB per step."""
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0,)
    """Ranks to profile; each writes one trace."""
    memory: bool = False
    """Also record a GPU memory snapshot of the profiled steps, with stack traces."""

    def checks(self) -> Iterator[Check]:
        """Check that no rank is listed twice."""
        yield "ranks", len(set(self.ranks)) < len(self.ranks), "must not contain duplicates"


class LogConfig(Section):
    """Logging interval and trackers."""

    interval: Count = 10
    """Number of steps between log lines on the console and in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers to which metrics are also logged. A tracker failure never stops the run."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases settings, used if `log.trackers` contains wandb. All other options are set
    by wandb's environment variables, such as WANDB_ENTITY, WANDB_TAGS and WANDB_MODE."""
    profile: ProfileConfig | None = None
    """Steps to profile; null = none. Perfetto traces are written to `profile/` in the run folder.
    Profiling does not affect results; if it fails, training continues."""

    def checks(self) -> Iterator[Check]:
        """Check that no tracker is listed twice."""
        names = self.trackers
        yield "trackers", len(set(names)) < len(names), "must not contain duplicates"


MonitorGroup = Literal[
    "weights", "gradients", "updates", "noise", "activations", "attention", "spectra"
]
"""Metric groups, described in docs/monitors.md."""


class MonitorsConfig(Section):
    """Monitoring of weights, gradients, updates and activations, written to monitors.jsonl."""

    interval: Whole | None = None
    """Number of steps between monitored steps; 0 disables the monitors. null = 100 on CPU; on GPUs,
    the smallest multiple of 100 for which the plan estimates an overhead of at most 1% of the run
    time."""
    groups: tuple[MonitorGroup, ...] = (
        "weights", "gradients", "updates", "activations", "attention",
    )  # fmt: skip
    """Metric groups to compute in addition to the rules' own metrics. noise and spectra are off by
    default: noise stores the gradients of `noise_samples` micro-batches and the weights of
    `noise_samples` steps; spectra computes the singular values of momentum and updates, which costs
    as much as for the weights."""
    activation_gib: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Per-rank memory limit, in GiB, for the Gram matrices of activations; beyond this limit, each
    monitored step measures a different subset of the layers, in rotation."""
    inspection_gib: Positive = 4.0
    """Per-rank memory limit, in GiB, for gathered matrices, which are inspected in groups of up to
    this size. A larger matrix is inspected on its own."""
    noise_samples: Annotated[int, Field(ge=2, le=4096)] = 8
    """Number of samples per noise metric: for gradients, the first micro-batches of a monitored
    step; for updates, the most recent steps, up to the monitored step."""


class Config(Section):
    """All settings of a run."""

    def phase_starts(self) -> list[int]:
        """Return the number of steps that precede each phase in `data.phases`."""
        steps, decay = self.train.steps, self.schedule.decay_start(self.train)
        return [
            decay if each.with_decay else each.after_steps or round((each.after_share or 0) * steps)
            for each in self.data.phases
        ]

    run: RunConfig
    seed: Whole = 1234
    """Random seed for weight initialisation and data order."""
    model: ModelConfig
    """Architecture of the model."""
    pc: PCConfig | None = None
    """PC layers (polynomial weight preconditioning); null = no PC layers, `{}` = the paper's
    settings."""
    gram_penalty: GramPenaltyConfig | None = None
    """Off-diagonal Gram penalty added to the loss; null = no penalty, `{}` = the paper's settings.
    """
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    plan: PlanConfig = PlanConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    spikes: SpikeConfig = SpikeConfig()
    log: LogConfig = LogConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    validation: ValidationConfig = ValidationConfig()
    tasks: TasksConfig = TasksConfig()


ADAMW_LEVEL: Final = 4
"""Default PC level under AdamW."""

SPECTRAL_LEVEL: Final = 2
"""Default PC level under Muon."""

SMALL_COEFFICIENT: Final = 1e-3
"""The Gram penalty paper's lambda for its 160M model (width 768)."""

LARGE_COEFFICIENT: Final = 1e-4
"""The Gram penalty paper's lambda for its 405M and 1.4B models (widths 1024 and 2048)."""

LARGE_WIDTH: Final = 1024
"""Smallest model width for which `LARGE_COEFFICIENT` is used."""


def with_paper_choices(config: Config) -> Config:
    """Replace nulls in `pc` and `gram_penalty` with the papers' choices.

    The saved config of the run contains these choices. A PC level that has no effect is set to
    null.
    """
    pc, penalty, optimizer = config.pc, config.gram_penalty, config.optimizer
    if pc is not None:
        spectral = RULES[optimizer.matrix.rule].whole_matrix
        level = (SPECTRAL_LEVEL if spectral else ADAMW_LEVEL) if pc.level is None else pc.level
        decay = pc.gamma_decay(optimizer.settings_for("gamma").weight_decay)
        pc = replace(
            pc,
            level=level if pc.polynomial.kind == "preset" else None,
            gamma_weight_decay=decay if pc.learnable_gamma else pc.gamma_weight_decay,
        )
    if penalty is not None and penalty.coefficient is None:
        large = config.model.hidden >= LARGE_WIDTH
        penalty = replace(penalty, coefficient=LARGE_COEFFICIENT if large else SMALL_COEFFICIENT)
    return replace(config, pc=pc, gram_penalty=penalty)
