"""The run config, made of its sections: the fields of each, the sentence under each field that
becomes its entry in docs/configuration.md, and what must hold within the section (`checks`).

What must hold between sections is in checks.py. The optimizer's section is in optimizer.py, those
of the model in models/. Start with Config, at the end.
"""

import re
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Annotated, Literal

from pydantic import Field

from models.config import ModelConfig
from models.layout import Layout
from models.pc_config import PCConfig
from models.section import AtLeast0, Check, Count, ExactInt, Positive, Section, Whole, named
from spectral.gram_penalty import Normalize, Side
from training.config.batch_ramp import Batch, EqualSteps, RampStage, ramp_checks
from training.config.data_phases import DataPhase
from training.config.optimizer import OptimizerConfig
from training.config.places import local_path

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
        """Check the folder."""
        wrong = not self.dir or self.dir.startswith("~")
        yield "dir", wrong, "must be the path of a folder, not empty and without ~"
        if not wrong:
            yield local_path("dir", self.dir)


class PlanConfig(Section):
    """The machine to plan for; it does not change the run."""

    gpus: Count | None = None
    """GPUs that `--dry-run` plans for without `--gpus`; null = the fewest the layout needs."""
    device: str = "h100"
    """GPU that `--dry-run` plans for without `--device`: h100, h200, a100, b200, or a YAML file of
    figures."""

    def checks(self) -> Iterator[Check]:
        """Check the file."""
        yield local_path("device", self.device)


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

    def checks(self) -> Iterator[Check]:
        """Check where weights come from."""
        yield local_path("initialize_from", self.initialize_from)


class StopConfig(Section):
    """When a run saves and stops before its last step; the same command continues it."""

    slurm_margin_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = 600.0
    """Seconds before the SLURM time limit at which to save and stop, at most half of what the job
    has left when the run starts; null ignores the limit."""


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


# Set names become parts of metric names.
SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class TrainSet(Section):
    """One training set of the blend."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""
    weight: AtLeast0 = 1.0
    """Weight of this set in the blend, relative to the other sets' weights; 0 for a set that only
    later phases read."""

    def checks(self) -> Iterator[Check]:
        """Check where the set is."""
        yield local_path("path", self.path)


class ValidationSet(Section):
    """One validation set, evaluated and logged under its name."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""

    def checks(self) -> Iterator[Check]:
        """Check where the set is."""
        yield local_path("path", self.path)


class DataConfig(Section):
    """Which tokens the run reads."""

    tokenizer: str | None = None
    """A tokenizer.json or Hugging Face tokenizer folder; null takes the data manifest's."""
    mock: bool = False
    """Make random tokens instead of reading files, in documents of 1,024 in the mean. The sets keep
    their names and weights; without any there is one, `mock`."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Background processes per rank that read samples; 0 reads in the training process."""
    verify: Literal["none", "sample", "full"] = "sample"
    """What the run checks against the manifest's hashes: none: nothing; sample: the tokenizer, the
    index, 64 blocks of tokens, and others when it first reads them; full: everything at each
    start."""
    document_mask: bool = False
    """Keep attention within each document of the sets' indexes, with positions from its first token
    in the sequence; false attends to all documents of a sequence. Validation does the same."""
    first_token_loss: bool = True
    """Count the loss of a document's first token, which is predicted from the end of another; false
    leaves it out of training and validation."""
    train: dict[str, TrainSet] = field(default_factory=dict)
    """Training sets by name; at least one, unless `mock`. `replace: true` beside them leaves out
    the base's section `data`, `NAME: null` one set of it. All sets must have one tokenizer."""
    phases: tuple[DataPhase, ...] = ()
    """Later parts of the run with other weights of the sets, such as
    `[{after_share: 0.8, weights: {web: 1, books: 3}}]`; [] has those of `train` throughout. Sets go
    on where they were."""
    validation: dict[str, ValidationSet] = field(default_factory=dict)
    """Validation sets by name, which becomes part of their metrics: `val/<name>/loss`. null leaves
    out sets as for `train`."""
    made_by: str | None = None
    """Command that makes the sets, and its cost; shown if a file of theirs is missing."""

    def checks(self) -> Iterator[Check]:
        """Check that there are sets, their names, and where the tokenizer is."""
        yield local_path("tokenizer", self.tokenizer)
        yield "train", not (self.train or self.mock), "must name at least one set, got none"
        for kind in ("train", "validation"):
            for name in getattr(self, kind):
                rule = f"must name sets by letters, digits, '_', '-' and '.', got {name!r}"
                yield kind, not SET_NAME.fullmatch(name), rule
        yield from self._weight_checks()

    def _weight_checks(self) -> Iterator[Check]:
        """Check that phases read sets that there are, and that each set is read."""
        read = {name for phase in self.phases for name in phase.weights}
        for i, phase in enumerate(self.phases):
            for name in phase.weights.keys() - self.train.keys():
                sets = named(name, self.train) if self.train else f"sets of train, got {name!r}"
                yield f"phases[{i}].weights", True, f"must name {sets}"
        somewhere = " here or in a phase" if self.phases else ""
        for name, each in self.train.items():
            unread = each.weight == 0 and name not in read
            yield f"train.{name}.weight", unread, f"must be above 0{somewhere}, got 0"
        first = not self.train or any(each.weight for each in self.train.values())
        yield "train", not first, "must have a set of a weight above 0 at the start, got only 0"


class GramPenaltyConfig(Section):
    """Off-diagonal Gram penalty on the loss; see docs/spectral.md."""

    roles: Annotated[tuple[str, ...], Field(min_length=1)] = ("v", "o", "down")
    """Roles whose matrices are penalised, each unit on its own."""
    coefficient: Positive | None = None
    """Coefficient of the sum of the penalties, the paper's lambda; null = the paper's choice: 1e-3
    for a model.hidden below 1024, as of its 160M parameters, 1e-4 from there on."""
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
    """How the model is split over ranks; data parallelism takes the rest of their number."""

    tensor: Ranks = 1
    """Tensor-parallel size: ranks that share every matrix."""
    pipeline: Ranks = 1
    """Pipeline-parallel size: ranks that share the layers."""
    virtual_pipeline: Ranks = 1
    """Model chunks per pipeline rank; more than 1 selects the interleaved schedule."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, which also has the embedding; null = as many as
    others."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, which also has the output head; null = as many as
    others."""
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
    null = if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """`sequence` with its default resolved."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def layout(self) -> Layout:
        """The sizes of all axes, and how the pipeline is cut."""
        return Layout(**{axis.name: getattr(self, axis.name) for axis in fields(Layout)})

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def checks(self) -> Iterator[Check]:
        """Check the layout, whatever the model."""
        whole, interleaved = self.pipeline == 1, self.virtual_pipeline > 1
        yield "virtual_pipeline", whole and interleaved, "needs pipeline > 1"
        for key in ("first_stage_layers", "last_stage_layers"):
            given = getattr(self, key) is not None
            yield key, given and whole, "needs pipeline > 1"
            yield key, given and interleaved, "needs virtual_pipeline = 1"
        yield "sequence", self.sequence and self.tensor == 1, "needs tensor > 1"


Steps = Annotated[int, Field(ge=1, le=10**10)]


class TrainConfig(Section):
    """How long the model is trained, on which batches, and in which precision."""

    steps: Steps
    """Optimizer steps of the whole run, where the learning-rate schedule ends."""
    exit_step: Count | None = None
    """Step after which the run ends early, on the schedule of `steps`; null = `steps`."""
    global_batch: Batch
    """Sequences per optimizer step, over all ranks; gradients accumulate over the micro-batches."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Stages at the start of the run with fewer sequences a step than `global_batch`, which follows
    on them, such as `[{batch: 64, until_tokens: 252000000}]`; [] has `global_batch` from the start.
    `steps` counts their steps too."""
    micro_batch: Batch
    """Sequences per forward and backward pass on one rank."""
    sequence_length: Annotated[int, Field(ge=1, le=1 << 26)]
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of forward and backward; master weights and optimizer state are fp32."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """FP8 format of linear layers under Transformer Engine; null computes them in `precision`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes: none; selective: those of dense and shared feed-forward
    blocks; full: all of a layer but its input."""
    loss_chunk: Count | None = None
    """Vocabulary entries per rank whose logits are in memory at once; backward then multiplies by
    the output head once more. null keeps all logits."""
    fused_loss: Literal["auto", "liger"] | None = "auto"
    """Kernels of the loss: liger uses liger-kernel, which passes over the logits twice; null uses
    the engine's, one pass per operation. auto is liger on a GPU if liger-kernel is installed and
    `loss_chunk` is null."""
    z_loss: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Coefficient of the z-loss, the mean squared log-sum-exp of a token's logits (PaLM: 1e-4),
    which is added to the loss that is minimised. `train/loss` and validation are without it,
    `train/z_loss` is the mean without the coefficient. 0 = none."""
    fused_backward: Literal["auto", "triton"] | None = "auto"
    """Kernels of the backward passes of gated activations and of the heads of attention: triton
    writes each gradient in one pass; null leaves it to `compile`, or to autograd. auto is triton on
    a GPU with Triton, null under Transformer Engine."""
    compile: Literal["auto", "inductor", "aot_eager"] | None = "auto"
    """Backend of torch.compile for norms with the sums before them, rotary embedding and
    activations: inductor fuses them,
    aot_eager captures the same graphs, for debugging; null does not compile. auto is inductor on a
    GPU where it works, null on a CPU and under Transformer Engine, which fuses the same
    operations."""
    max_skipped_steps: Whole = 10
    """Consecutive non-finite steps to skip before the run aborts."""

    @property
    def last(self) -> int:
        """Step after which the run ends, `exit_step` or `steps`."""
        return self.exit_step or self.steps

    def equal_steps(
        self, step: int = 0, tokens: int = 0, until: int | None = None
    ) -> Iterator[EqualSteps]:
        """Yield the parts of the run with one global batch, after `step` steps and `tokens` tokens,
        to step `until` or the last."""
        last = self.steps if until is None else until
        for stage in self.batch_ramp:
            left = stage.steps_left(step, tokens, self.sequence_length)
            if (count := min(left, last - step)) > 0:
                yield EqualSteps(step, count, stage.batch)
                step, tokens = step + count, tokens + count * stage.batch * self.sequence_length
        if step < last:
            yield EqualSteps(step, last - step, self.global_batch)

    def batch(self, step: int, tokens: int) -> int:
        """Return the global batch of the step after `step` steps and `tokens` tokens."""
        return next((each.batch for each in self.equal_steps(step, tokens)), self.global_batch)

    def samples(self, step: int = 0, tokens: int = 0, until: int | None = None) -> int:
        """Return the sequences of the parts that `equal_steps` yields."""
        return sum(each.samples for each in self.equal_steps(step, tokens, until))

    @property
    def batches(self) -> list[int]:
        """All global batches of the run, ascending."""
        return [*(stage.batch for stage in self.batch_ramp), self.global_batch]

    def checks(self) -> Iterator[Check]:
        """Check the loss, the precision and the length."""
        chunked = self.fused_loss == "liger" and self.loss_chunk is not None
        yield "loss_chunk", chunked, "must be null with fused_loss liger"
        yield "fp8", self.fp8 is not None and self.precision != "bf16", "needs precision bf16"
        late = self.exit_step is not None and self.exit_step > self.steps
        yield "exit_step", late, f"must be at most steps = {self.steps}"
        run = self.global_batch, self.steps, self.sequence_length
        yield from ramp_checks(self.batch_ramp, *run)


class ScheduleConfig(Section):
    """Learning rate over the run, as a factor on every group's peak."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warmup-stable-decay) is constant, then decays linearly."""
    unit: Literal["steps", "tokens"] = "steps"
    """What warm-up and decay count: steps, or tokens, of which `train.global_batch` sequences are
    one step: a step of `train.batch_ramp` then moves the rate by its share."""
    warmup_steps: Whole = 0
    """Steps of linear warm-up from 0 to the peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the run, for every kind but constant."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the run over which wsd decays."""

    def length(self, train: TrainConfig) -> float:
        """Return the length of a run in steps, or in tokens over those of a full step."""
        return train.steps if self.unit == "steps" else train.samples() / train.global_batch

    def cooldown_steps(self, total_steps: float) -> int:
        """Return the steps over which wsd decays in a run of `total_steps`."""
        return round(self.cooldown_fraction * total_steps)

    def decay_start(self, train: TrainConfig) -> int:
        """Return the steps of a run before wsd decays."""
        cooldown = self.cooldown_steps(self.length(train))
        if self.unit == "steps":
            return train.steps - cooldown
        left = train.samples() - cooldown * train.global_batch
        for part in train.equal_steps():
            if left <= part.samples:
                return part.first + -(-left // part.batch)
            left -= part.samples
        return train.steps


class WandbConfig(Section):
    """How the run appears in Weights & Biases, if `log.trackers` has wandb.

    Team, group, tags and mode are those of its environment variables, such as WANDB_ENTITY.
    """

    project: str = "spectrain"
    """Project of the run."""


class ProfileConfig(Section):
    """Which steps of which ranks are profiled, and with what."""

    first: Count
    """First step to profile, counted from 1; the first steps of a run are slower than others."""
    steps: Count = 3
    """Number of steps; a trace of a large model takes tens of MB a step."""
    ranks: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0,)
    """Ranks to profile, a trace each."""
    memory: bool = False
    """Also write a snapshot of the GPU memory that was allocated in these steps, and by what."""

    def checks(self) -> Iterator[Check]:
        """Check the ranks."""
        twice = len(set(self.ranks)) < len(self.ranks)
        yield "ranks", twice, "must name each rank once"


class LogConfig(Section):
    """How often the run reports, and where."""

    interval: Count = 10
    """Steps between console lines and entries in metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Services that get the same metrics. A tracker that fails never stops the run."""
    wandb: WandbConfig = WandbConfig()
    """How the run appears in Weights & Biases, if `log.trackers` has wandb. Its environment
    variables, such as WANDB_ENTITY, WANDB_TAGS and WANDB_MODE, say the rest."""
    profile: ProfileConfig | None = None
    """Steps whose operations are timed, each a trace in `profile/` of the run folder for Perfetto;
    null = none. No result depends on it, and no failure of it ends the run."""


MonitorGroup = Literal[
    "weights", "gradients", "updates", "noise", "activations", "attention", "spectra"
]
"""Groups of figures that docs/monitors.md describes."""


class MonitorsConfig(Section):
    """What monitors measure of weights, gradients, updates and activations, for monitors.jsonl."""

    interval: Whole | None = None
    """Steps between monitored steps; 0 turns monitors off. Null: on GPUs the first multiple of 100
    at which monitors add at most 1% to the time of the run, by the plan's model; 100 on a CPU."""
    groups: tuple[MonitorGroup, ...] = (
        "weights", "gradients", "updates", "activations", "attention",
    )  # fmt: skip
    """Groups of figures to compute, besides those that rules report. noise is off by default: it
    keeps the gradients of `noise_samples` micro-batches and the weights of as many steps. spectra
    is, too: the singular values of momentum and update, which cost as much as those of weights."""
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


class TasksConfig(Section):
    """Multiple-choice tasks that the model in training is scored on."""

    files: dict[str, str] = field(default_factory=dict)
    """Files of tasks by name, which becomes part of their metrics, `task/<name>/acc`: a line is
    `{"context": "...", "choices": ["...", "..."], "answer": 0}`; scripts/prepare_task.py makes
    them. null leaves out tasks of a base as for `data.train`."""
    interval: Whole = 0
    """Steps between scorings, besides the one after the last step; 0 has only that one."""
    examples: Count | None = None
    """Number of examples of each file to score, from its first; null = all."""

    def checks(self) -> Iterator[Check]:
        """Check the names, and where the files are."""
        for name, path in self.files.items():
            rule = f"must name tasks by letters, digits, '_', '-' and '.', got {name!r}"
            yield "files", not SET_NAME.fullmatch(name), rule
            _, wrong, rule = local_path("files", path)
            yield "files", wrong, f"{rule}, got {path!r} for {name}"


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
    """PC layers (polynomial weight preconditioning); null has none, `{}` has the paper's."""
    gram_penalty: GramPenaltyConfig | None = None
    """Off-diagonal Gram penalty on the loss; null has none, `{}` has the paper's."""
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
