"""The run config and its sections. The sentence under each field is its entry in
docs/configuration.md. The method `checks` checks the conditions within a section. checks.py
contains the conditions between sections. The sections about data are in data.py, `train` and
`schedule` in schedule.py, `optimizer` in optimizer_section.py, `model` in models/. Start with
Config, at the end.
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
"""Parts of a run's identity; see training/checkpoint/resume.py."""


class RunConfig(Section):
    """Name, output folder and device of the run."""

    name: str
    """Name of the run in logs and trackers."""
    dir: str
    """Folder for all output of the run."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. cuda: one GPU per rank; cpu: no GPU; auto: one GPU per rank if the
    machine has GPUs (an error if CUDA does not initialize), else no GPU."""
    deterministic: bool = False
    """Use only deterministic GPU kernels, which slows the backward pass of attention. A warning
    names each operation without a deterministic kernel."""

    def checks(self) -> Iterator[Check]:
        """Check the name, which is often part of `dir`, and the path of the folder."""
        bad = {"", ".", ".."}.intersection(part.strip() for part in self.name.split("/"))
        rule = "must be names separated by /, not '.' or '..', without control characters"
        yield "name", bad or "\n" in self.name or printable(self.name) != self.name, rule
        yield "dir", not self.dir, "must be the path of a folder"
        yield local_path("dir", self.dir)


class PlanConfig(Section):
    """Default machine for plans; no effect on the run."""

    gpus: Count | None = None
    """Number of GPUs for `--dry-run` if `--gpus` is not given; null = the smallest number that the
    layout allows."""
    device: str = "h100"
    """GPU type for `--dry-run` if `--device` is not given: h100, h200, a100, b200, or a YAML file
    that describes a GPU."""

    def checks(self) -> Iterator[Check]:
        """Check the path of a device file."""
        yield local_path("device", self.device)


class CheckpointConfig(Section):
    """Saving of checkpoints, and conditions for continuing from a checkpoint."""

    interval: Whole = 1000
    """Steps between checkpoints; a run also saves when it ends or is stopped. 0 never saves."""
    keep_last: Count | None = 3
    """Number of newest checkpoints to keep; null keeps all checkpoints."""
    keep_every: Count | None = None
    """Also keep the checkpoints whose step is a multiple of this number; null keeps only the newest
    checkpoints."""
    allow_change: tuple[Kind, ...] = ()
    """Kinds of settings that may differ from the checkpoint that a run continues from; other
    differences raise an error. With `tokenizer`, `initialize_from` also accepts weights that were
    trained with another tokenizer."""
    initialize_from: str | None = None
    """Run folder or checkpoint, of any layout, with the initial weights of a new run; null
    initialises random weights. The checkpoint's model and tokenizer must equal the new run's; its
    PC layers become plain weights."""

    def checks(self) -> Iterator[Check]:
        """Check the path of initial weights."""
        yield local_path("initialize_from", self.initialize_from)


class StopConfig(Section):
    """Early stops, which save a checkpoint; the same command then continues the run."""

    slurm_margin_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = 600.0
    """Seconds before the SLURM time limit at which the run saves and stops; capped at half of the
    job's remaining time at the start of the run. null ignores the limit."""


class WatchdogConfig(Section):
    """Detection of hanging ranks and corrupted weights."""

    hang_seconds: Seconds | None = 300.0
    """Seconds without progress after which every rank writes its call stack to `stacks/`; capped at
    half of `parallel.timeout_seconds`. null disables stack traces."""
    replica_interval: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps between checks that weights change only in optimizer steps and that all replicas are
    equal; a difference ends the run. For these checks, every step reads all weights twice and waits
    for the new weights. 0 disables the checks."""


class SpikeConfig(Section):
    """Handling of loss spikes, and of too many consecutive skipped steps."""

    deviations: Positive | None = None
    """Skip a step whose loss is more than this many standard deviations above the mean of the last
    `window` losses; null skips only steps with a non-finite loss or gradient."""
    window: Annotated[int, Field(ge=2, le=10**6)] = 128
    """Number of past losses from which mean and deviation are computed; the first `window` losses
    of a run are never spikes.
    """
    rewinds: Whole = 0
    """Number of times that a run, after too many skipped steps, may return to its last checkpoint
    and skip these steps' samples instead of ending."""


class GramPenaltyConfig(Section):
    """Off-diagonal Gram penalty added to the loss. See docs/spectral.md."""

    roles: Annotated[tuple[str, ...], Field(min_length=1)] = ("v", "o", "down")
    """Roles whose matrices are penalised, each unit separately."""
    coefficient: Positive | None = None
    """Coefficient of the sum of the penalties, the paper's lambda; null = the paper's choice, 1e-3
    if model.hidden is below 1024 (as in the paper's 160M model), else 1e-4."""
    horizon: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of the run, from its start, in which the penalty is active, in (0, 1]."""
    power: Annotated[Literal[1, 2], ExactInt] = 2
    """2: penalise the squared Frobenius norm of the Gram matrix's off-diagonal part; 1: the norm
    itself."""
    side: Side = "in"
    """Gram matrix to penalise. in: W^T W, of the columns; out: W W^T, of the rows."""
    normalize: Normalize | None = None
    """Divisor of the squared norm. frobenius: ||W||_F^4; size: n (n - 1); null: 1."""

    def last_step(self, steps: int) -> int:
        """Return the last step, counted from 1, with the penalty in a run of `steps` steps."""
        return max(1, round(self.horizon * steps))


Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


class ParallelConfig(Section):
    """Parallelism of the model. The data-parallel size is the number of ranks divided by `tensor`,
    `pipeline` and `context`."""

    tensor: Ranks = 1
    """Tensor-parallel size: number of ranks over which each weight matrix is split."""
    pipeline: Ranks = 1
    """Pipeline-parallel size: number of ranks over which the layers are split."""
    virtual_pipeline: Ranks = 1
    """Model chunks per pipeline rank; more than 1 selects the interleaved schedule."""
    first_stage_layers: Count | None = None
    """Number of layers of the first pipeline stage, which also contains the embedding; null = as
    many as in the other stages."""
    last_stage_layers: Count | None = None
    """Number of layers of the last pipeline stage, which also contains the output head; null = as
    many as in the other stages."""
    expert: Ranks = 1
    """Expert-parallel size: number of ranks over which the experts of a layer are distributed."""
    expert_tensor: Ranks = 1
    """Tensor-parallel size of routed experts, independent of `tensor`."""
    context: Ranks = 1
    """Context-parallel size: number of ranks over which each sequence is split."""
    timeout_seconds: Seconds = 600.0
    """Seconds that a collective waits for other ranks before the run ends with an error."""
    sequence: bool | None = None
    """Sequence parallelism: split the activations of norms and residuals over the tensor-parallel
    ranks; null = true if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """The value of `sequence`, with null resolved."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def layout(self) -> Layout:
        """The sizes of all parallel axes, and the division of layers into pipeline stages."""
        return Layout(**{axis.name: getattr(self, axis.name) for axis in fields(Layout)})

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def checks(self) -> Iterator[Check]:
        """Check the conditions that do not depend on the model."""
        one_stage, interleaved = self.pipeline == 1, self.virtual_pipeline > 1
        yield "virtual_pipeline", one_stage and interleaved, "needs pipeline > 1"
        for key in ("first_stage_layers", "last_stage_layers"):
            uneven = getattr(self, key) is not None
            yield key, uneven and one_stage, "needs pipeline > 1"
            yield key, uneven and interleaved, "needs virtual_pipeline = 1"
        yield "sequence", self.sequence and self.tensor == 1, "needs tensor > 1"


class WandbConfig(Section):
    """Settings of Weights & Biases, used if `log.trackers` contains wandb.

    wandb's environment variables, such as WANDB_ENTITY, set team, group, tags and mode.
    """

    project: str = "spectrain"
    """Project to which the run is logged."""


class ProfileConfig(Section):
    """Profiled steps and ranks."""

    first: Count
    """First step to profile, counted from 1. The first steps of a run are slower than later steps.
    """
    steps: Count = 3
    """Number of steps to profile; the trace of a large model takes tens of MB per step."""
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0,)
    """Ranks to profile; each rank writes one trace."""
    memory: bool = False
    """Also write a snapshot of the GPU memory allocated in the profiled steps, with stack traces.
    """

    def checks(self) -> Iterator[Check]:
        """Check the ranks."""
        yield "ranks", len(set(self.ranks)) < len(self.ranks), "must name each rank once"


class LogConfig(Section):
    """Interval and destinations of reports."""

    interval: Count = 10
    """Steps between console lines and entries in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers that also receive the metrics. A tracker failure never stops the run."""
    wandb: WandbConfig = WandbConfig()
    """Settings of Weights & Biases, used if `log.trackers` contains wandb. wandb's environment
    variables, such as WANDB_ENTITY, WANDB_TAGS and WANDB_MODE, set all other options."""
    profile: ProfileConfig | None = None
    """Steps to profile; null = none. Traces for Perfetto are written to `profile/` in the run
    folder. Profiling does not change results; if it fails, the run continues."""

    def checks(self) -> Iterator[Check]:
        """Check the trackers."""
        names = self.trackers
        yield "trackers", len(set(names)) < len(names), "must name each tracker once"


MonitorGroup = Literal[
    "weights", "gradients", "updates", "noise", "activations", "attention", "spectra"
]
"""Groups of metrics, described in docs/monitors.md."""


class MonitorsConfig(Section):
    """Monitors of weights, gradients, updates and activations, written to monitors.jsonl."""

    interval: Whole | None = None
    """Steps between monitored steps; 0 disables monitors. null = 100 on a CPU; on GPUs, the
    smallest multiple of 100 with which monitors add at most 1% to the run's time, as estimated by
    the plan."""
    groups: tuple[MonitorGroup, ...] = (
        "weights", "gradients", "updates", "activations", "attention",
    )  # fmt: skip
    """Groups of metrics to compute, in addition to the rules' metrics. noise and
    spectra are off by default: noise stores the gradients of `noise_samples` micro-batches and the
    weights of `noise_samples` steps; spectra computes the singular values of momentum and updates,
    which cost as much as the singular values of weights."""
    activation_gib: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """Memory per rank, in GiB, for the Gram matrices of activations; if they need more, each
    monitored step measures only some of the layers, in turn."""
    inspection_gib: Positive = 4.0
    """Memory per rank, in GiB, for matrices that are gathered at the same time; the matrices are
    inspected in groups of this size. A larger matrix is inspected alone."""
    noise_samples: Annotated[int, Field(ge=2, le=4096)] = 8
    """Number of samples per noise metric: for gradients, the first micro-batches of a monitored
    step; for updates, the last steps up to and including it."""


class Config(Section):
    """All settings of a run."""

    def phase_starts(self) -> list[int]:
        """Return the number of steps before each phase of `data.phases`."""
        steps, decay = self.train.steps, self.schedule.decay_start(self.train)
        return [
            decay if each.with_decay else each.after_steps or round((each.after_share or 0) * steps)
            for each in self.data.phases
        ]

    run: RunConfig
    seed: Whole = 1234
    """Seed of the initial weights and of the data order."""
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
"""Default level of PC layers under AdamW."""

SPECTRAL_LEVEL: Final = 2
"""Default level of PC layers under Muon."""

SMALL_COEFFICIENT: Final = 1e-3
"""The paper's lambda of the Gram penalty for its 160M model, which has width 768."""

LARGE_COEFFICIENT: Final = 1e-4
"""The paper's lambda for its 405M and 1.4B models, which have widths 1024 and 2048."""

LARGE_WIDTH: Final = 1024
"""Smallest width of a model with `LARGE_COEFFICIENT`."""


def with_paper_choices(config: Config) -> Config:
    """Return `config` with nulls in `pc` and `gram_penalty` replaced by the papers' choices.

    The saved config of a run therefore contains these choices. A level without effect becomes null.
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
