"""The run config and its sections: fields, the sentence under each field (its entry in
docs/configuration.md), and conditions within a section (`checks`).

Conditions between sections are in checks.py. The sections about data are in data.py, `train` and
`schedule` in schedule.py, the optimizer's in optimizer_section.py, the model's in models/. Start
with Config, at the end.
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
from training.config.data import DataConfig, TasksConfig, ValidationConfig, local_path
from training.config.optimizer_section import OptimizerConfig
from training.config.schedule import ScheduleConfig, TrainConfig
from training.errors import printable

Seconds = Annotated[float, Field(gt=0, le=1e7)]

Kind = Literal["data", "tokenizer", "model", "optimizer", "schedule", "train"]
"""Parts of a run's identity; see training/checkpoint/resume_rules.py."""


class RunConfig(Section):
    """Name, output folder and device of the run."""

    name: str
    """Name of the run in logs and trackers."""
    dir: str
    """Folder for all output of the run."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on: cuda uses one GPU per rank, cpu uses no GPU, auto uses GPUs if there are
    any, and fails if a GPU does not start."""
    deterministic: bool = False
    """Use only GPU kernels that repeat bit for bit, which slows the backward pass of attention. A
    warning names each operation without such a kernel."""

    def checks(self) -> Iterator[Check]:
        """Check the name, which is often part of `dir`, and the folder."""
        bad = {"", ".", ".."}.intersection(part.strip() for part in self.name.split("/"))
        rule = "must be one or more names joined by /, without . and .. and control characters"
        yield "name", bad or "\n" in self.name or printable(self.name) != self.name, rule
        wrong = not self.dir or self.dir.startswith("~")
        yield "dir", wrong, "must be the path of a folder, not empty and without ~"
        if not wrong:
            yield local_path("dir", self.dir)


class PlanConfig(Section):
    """The machine to plan for; it does not change the run."""

    gpus: Count | None = None
    """GPUs that `--dry-run` plans for without `--gpus`; null = the fewest that the layout needs."""
    device: str = "h100"
    """GPU that `--dry-run` plans for without `--device`: h100, h200, a100, b200, or a YAML file
    that describes one."""

    def checks(self) -> Iterator[Check]:
        """Check the file."""
        yield local_path("device", self.device)


class CheckpointConfig(Section):
    """Saving of checkpoints, and conditions for continuing from them."""

    interval: Whole = 1000
    """Steps between checkpoints; a run also saves when it ends or is stopped. 0 never saves."""
    keep_last: Count | None = 3
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: Count | None = None
    """Also keep checkpoints whose step is a multiple of this; null keeps only the newest."""
    allow_change: tuple[Kind, ...] = ()
    """Kinds of settings that may differ from the continued checkpoint; other differences are
    refused. `tokenizer` also lets `initialize_from` name weights of another tokenizer."""
    initialize_from: str | None = None
    """Run folder or checkpoint, of any layout, from whose weights a new run starts; null
    initialises new weights. Model and tokenizer must be the run's; PC layers become plain
    weights."""

    def checks(self) -> Iterator[Check]:
        """Check the path of initial weights."""
        yield local_path("initialize_from", self.initialize_from)


class StopConfig(Section):
    """Conditions to save and stop before the last step; the same command continues the run."""

    slurm_margin_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = 600.0
    """Seconds before the SLURM time limit at which to save and stop, at most half of the job's
    remaining time at the start of the run; null ignores the limit."""


class WatchdogConfig(Section):
    """Detection of hanging ranks and of weights that change between steps."""

    hang_seconds: Seconds | None = 300.0
    """Seconds without progress after which every rank writes its stack to `stacks/`, at most half
    of `parallel.timeout_seconds`; null writes none."""
    replica_interval: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps between checks that the weights have changed only in steps and that all copies are
    equal. A difference ends the run. Every step then reads all weights twice and waits for the new
    weights. 0 never checks."""


class SpikeConfig(Section):
    """Handling of loss spikes, and of too many consecutive skipped steps."""

    deviations: Positive | None = None
    """Skip a step whose loss is this many standard deviations above the mean of the last `window`
    losses; null skips only non-finite losses and gradients."""
    window: Annotated[int, Field(ge=2, le=10**6)] = 128
    """Number of past losses to compare with; the first `window` losses of a run are never spikes.
    """
    rewinds: Whole = 0
    """Number of times that the run may return to its last checkpoint and skip the failed samples,
    instead of ending after `train.max_skipped_steps`."""


class GramPenaltyConfig(Section):
    """Off-diagonal Gram penalty added to the loss; see docs/spectral.md."""

    roles: Annotated[tuple[str, ...], Field(min_length=1)] = ("v", "o", "down")
    """Roles whose matrices are penalised, each unit separately."""
    coefficient: Positive | None = None
    """Coefficient of the sum of the penalties, the paper's lambda; null = the paper's choice: 1e-3
    for a model.hidden below 1024 (such as its 160M model), else 1e-4."""
    horizon: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of the run, from its start, in which the penalty is active; in (0, 1]."""
    power: Annotated[Literal[1, 2], ExactInt] = 2
    """2 penalises the squared Frobenius norm of the off-diagonal part, 1 the norm itself."""
    side: Side = "in"
    """Gram matrix of the columns, W^T W (in), or of the rows, W W^T (out)."""
    normalize: Normalize | None = None
    """Divisor of the squared norm: ||W||_F^4 (frobenius) or n (n - 1) (size); null = 1."""

    def last_step(self, steps: int) -> int:
        """Return the last step of the horizon, counted from 1, in a run of `steps`."""
        return max(1, round(self.horizon * steps))


Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


class ParallelConfig(Section):
    """Split of the model over ranks; the remaining ranks are data-parallel."""

    tensor: Ranks = 1
    """Tensor-parallel size: ranks that share every matrix."""
    pipeline: Ranks = 1
    """Pipeline-parallel size: ranks that share the layers."""
    virtual_pipeline: Ranks = 1
    """Model chunks per pipeline rank; more than 1 selects the interleaved schedule."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, which also contains the embedding; null = as many as
    other stages."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, which also contains the output head; null = as many as
    other stages."""
    expert: Ranks = 1
    """Expert-parallel size: ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor: Ranks = 1
    """Tensor-parallel size of routed experts, independent of `tensor`."""
    context: Ranks = 1
    """Context-parallel size: ranks that share each sequence."""
    timeout_seconds: Seconds = 600.0
    """Seconds that a collective waits for a rank before the run ends."""
    sequence: bool | None = None
    """Sequence parallelism: split activations outside the matrices over the tensor ranks too;
    null = true if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """`sequence` with its default resolved."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def layout(self) -> Layout:
        """The sizes of all axes, and the division of the pipeline."""
        return Layout(**{axis.name: getattr(self, axis.name) for axis in fields(Layout)})

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def checks(self) -> Iterator[Check]:
        """Check the layout for any model."""
        one_stage, interleaved = self.pipeline == 1, self.virtual_pipeline > 1
        yield "virtual_pipeline", one_stage and interleaved, "needs pipeline > 1"
        for key in ("first_stage_layers", "last_stage_layers"):
            uneven = getattr(self, key) is not None
            yield key, uneven and one_stage, "needs pipeline > 1"
            yield key, uneven and interleaved, "needs virtual_pipeline = 1"
        yield "sequence", self.sequence and self.tensor == 1, "needs tensor > 1"


class WandbConfig(Section):
    """Settings of the run in Weights & Biases, if `log.trackers` contains wandb.

    The environment variables of wandb, such as WANDB_ENTITY, set team, group, tags and mode.
    """

    project: str = "spectrain"
    """Project of the run."""


class ProfileConfig(Section):
    """Profiled steps and ranks."""

    first: Count
    """First step to profile, counted from 1; the first steps of a run are slower than others."""
    steps: Count = 3
    """Number of steps; a trace of a large model takes tens of MB per step."""
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0,)
    """Ranks to profile, with one trace per rank."""
    memory: bool = False
    """Also write a snapshot of the GPU memory allocated in these steps, with the allocating code.
    """

    def checks(self) -> Iterator[Check]:
        """Check the ranks."""
        yield "ranks", len(set(self.ranks)) < len(self.ranks), "must name each rank once"


class LogConfig(Section):
    """Interval and destinations of reports."""

    interval: Count = 10
    """Steps between console lines and entries in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Services that also receive the metrics. A tracker that fails never stops the run."""
    wandb: WandbConfig = WandbConfig()
    """The run in Weights & Biases, if `log.trackers` contains wandb. wandb's environment variables,
    such as WANDB_ENTITY, WANDB_TAGS and WANDB_MODE, set everything else."""
    profile: ProfileConfig | None = None
    """Steps to profile; null = none. Traces for Perfetto are written to `profile/` in the run
    folder. A profile does not change results, and its failure does not end the run."""

    def checks(self) -> Iterator[Check]:
        """Check the trackers."""
        names = self.trackers
        yield "trackers", len(set(names)) < len(names), "must name each tracker once"


MonitorGroup = Literal[
    "weights", "gradients", "updates", "noise", "activations", "attention", "spectra"
]
"""Groups of figures that docs/monitors.md describes."""


class MonitorsConfig(Section):
    """Monitors of weights, gradients, updates and activations, written to monitors.jsonl."""

    interval: Whole | None = None
    """Steps between monitored steps; 0 turns monitors off. null = 100 on a CPU; on GPUs, the
    smallest multiple of 100 at which monitors add at most 1% to the run's time, as the plan
    estimates it."""
    groups: tuple[MonitorGroup, ...] = (
        "weights", "gradients", "updates", "activations", "attention",
    )  # fmt: skip
    """Groups of figures to compute, in addition to the figures that rules report. noise is off by
    default: it keeps the gradients of `noise_samples` micro-batches and the weights of
    `noise_samples` steps. spectra is off by default too: singular values of momentum and update
    cost as much as those of weights."""
    activation_gib: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """GiB per rank for the Gram matrices of activations; if they do not fit, monitored steps
    measure the layers in turn."""
    inspection_gib: Positive = 4.0
    """GiB per rank for the matrices that are gathered at once; other matrices are inspected in
    turn. A single matrix may use more."""
    noise_samples: Annotated[int, Field(ge=2, le=4096)] = 8
    """Number of samples of each noise figure: the first micro-batches of a monitored step, or the
    last steps up to it."""


class Config(Section):
    """A whole run."""

    def phase_starts(self) -> list[int]:
        """Return the steps before each of `data.phases`."""
        steps, decay = self.train.steps, self.schedule.decay_start(self.train)
        return [
            decay if each.with_decay else each.after_steps or round((each.after_share or 0) * steps)
            for each in self.data.phases
        ]

    run: RunConfig
    seed: Whole = 1234
    """Seed of the initial weights and of the data order."""
    model: ModelConfig
    """Shape of the model."""
    pc: PCConfig | None = None
    """PC layers (polynomial weight preconditioning); null = none, `{}` = the paper's settings."""
    gram_penalty: GramPenaltyConfig | None = None
    """Off-diagonal Gram penalty on the loss; null = none, `{}` = the paper's settings."""
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
"""The level of PC layers under AdamW."""

SPECTRAL_LEVEL: Final = 2
"""The level of PC layers under Muon."""

SMALL_COEFFICIENT: Final = 1e-3
"""The lambda of the Gram penalty for 160M parameters, whose width is 768."""

LARGE_COEFFICIENT: Final = 1e-4
"""The lambda for 405M and 1.4B parameters, whose widths are 1024 and 2048."""

LARGE_WIDTH: Final = 1024
"""Smallest width of a model with `LARGE_COEFFICIENT`."""


def with_paper_choices(config: Config) -> Config:
    """Return `config` with nulls of PC layers and Gram penalty replaced by the papers' choices.

    A run's saved config is thus explicit. A level without effect becomes null.
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
