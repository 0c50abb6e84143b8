"""The run config: its sections, how a YAML file becomes one, and how it is written back.

The sentence under each field is its manual; `python -m training.config.schema --markdown` prints them all.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from omegaconf import OmegaConf

from models.config import ModelConfig
from models.pc_config import PCConfig, PCOverride, PolynomialConfig
from models.units import QKVUnits
from spectral.rules import RULES, Rule
from training.config.schema.checks import sections as config_checks
from training.config.schema import penalty as config_penalty
from training.config.schema.checks import layout as layout_checks
from training.config.schema.checks import pc as pc_checks
from training.config.binding import Binder, Check, InvalidConfigError, walk_checks
from training.config.files import read_merged
from training.config.manual import markdown_tables
from training.config.penalty import AdaptiveConfig, GramPenaltyConfig
from training.config.running import (
    AutoRuleConfig,
    CheckpointConfig,
    LogConfig,
    MonitorsConfig,
    RunConfig,
    ScheduleConfig,
    SpikeConfig,
    StopConfig,
    ValidationConfig,
    WatchdogConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainSet:
    """One training set of the blend."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""
    weight: float = 1.0
    """Share of this set in the blend, relative to the other weights."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """One validation set, evaluated and logged under its name."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens are read."""

    tokenizer: str | None = None
    """A tokenizer.json or Hugging Face tokenizer folder; null = the one the data manifest names."""
    workers: int = 0
    """Background processes per rank that read samples; 0 = read in the training process."""
    train: dict[str, TrainSet]
    """Training sets by name."""
    validation: dict[str, ValidationSet] = field(default_factory=dict)
    """Validation sets by name; metrics are named `val/<name>/loss` and so on."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is cut over ranks; data parallelism takes the ranks that are left."""

    tensor: int = 1
    """Ranks that share every matrix."""
    pipeline: int = 1
    """Ranks that share the layers."""
    virtual_pipeline: int = 1
    """Stages per pipeline rank, for the interleaved schedule."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, which also has the embedding; null = as the others."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, which also has the head; null = as the others."""
    expert: int = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor: int = 1
    """Ranks that share every routed expert's matrices, whatever `tensor` is."""
    context: int = 1
    """Ranks that share each sequence."""
    timeout_seconds: float = 600.0
    """Stop the run when a collective has waited so long for a rank."""
    sequence: bool | None = None
    """Cut activations outside the matrices over the tensor ranks too; null = if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """`sequence`, the default filled in."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and on how much at once the model is trained."""

    steps: int
    """Optimizer steps of the whole run; the schedule ends here."""
    exit_step: int | None = None
    """Stop cleanly after this step, with the schedule of the whole run; null = after `steps`."""
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    micro_batch: int
    """Sequences per forward and backward pass on one rank."""
    sequence_length: int
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of forward and backward; master weights, reductions and optimizer state stay fp32."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """Format of the linears' products on Transformer Engine; null = those of `precision`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again instead of keeping: none, those of
    dense and shared feed-forward blocks (selective), or all of a layer but its input (full)."""
    loss_chunk: int | None = None
    """Vocabulary entries of a rank whose logits exist at one time, forward and backward; costs one
    more product with the head in backward. null = all, kept from forward to backward."""
    compile: Literal["inductor", "aot_eager"] | None = None
    """Backend of torch.compile for norms, rotary positions and activations: fused kernels
    (inductor), or the same graphs without kernels, to find faults (aot_eager); null = no graphs."""
    max_skipped_steps: int = 10
    """Steps in a row that are skipped for a loss or gradient that is not finite; one more stops."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Clipping of the gradient to a global norm."""

    max_norm: float | None = 1.0
    """Largest global gradient norm; null = do not clip."""
    whole_matrix_roles: bool = True
    """Whether units of spectral rules count in the norm and are clipped."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How the roles of one group are optimized."""

    rule: str
    """Update rule, a name under `optimizer.rules`."""
    lr: float
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step multiplies the weight by 1 - lr * weight_decay."""


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """What one role does otherwise than its group; what is left out is the group's."""

    rule: str | None = None
    """Update rule; null = the group's, for routers adamw."""
    lr: float | None = None
    """Peak learning rate; null = the group's."""
    weight_decay: float | None = None
    """Decoupled weight decay; null = the group's."""


if TYPE_CHECKING:

    class RulesConfig:
        """One section of settings per update rule."""

        def __init__(self, **rules: Rule) -> None: ...
        def __getattr__(self, name: str) -> Rule: ...

else:
    RulesConfig = make_dataclass(
        "RulesConfig",
        [(name, rule, field(default_factory=rule)) for name, rule in RULES.items()],
        frozen=True,
        kw_only=True,
        namespace={"__doc__": "One section of settings per update rule."},
    )


class RoleSettings(NamedTuple):
    """How one role is optimized."""

    rule: str
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the optimizer's work and memory are spread over ranks; but for `tensor_mode: shardwise`
    no result depends on it."""

    storage: Literal["auto", "even", "owner"] = "auto"
    """Shards of a bucket: equal bytes (even), aligned to matrices (owner), or per bucket (auto)."""
    placement: Literal["auto", "ping_pong", "longest_processing_time", "round_robin"] = "auto"
    """Which rank steps which matrix; auto takes the one with the smallest predicted load."""
    tensor_mode: Literal["home", "duplicated", "shardwise"] = "home"
    """Who steps a matrix cut by tensor parallelism: one home, every rank of it (duplicated, for
    comparison), or each rank its own piece as a matrix by itself (shardwise, other mathematics)."""
    bucket_elements: int | None = None
    """Elements of a gradient bucket; null = one or two layers."""
    step_groups: int = 4
    """Groups of buckets that are stepped and sent one after the other."""
    exchange_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which momentum and updates of cut matrices travel; null = train.precision."""
    gradient_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which gradients are accumulated and reduced; null = fp32, or wider weights' own."""
    momentum_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which matrix rules keep their momentum; null = that of the masters."""
    overlap_reduce: bool = True
    """Reduce a bucket's gradients as soon as backward has completed it."""
    overlap_gather: bool = True
    """Let new weights arrive during the next forward pass."""
    cuda_graph: bool = False
    """Record clipping and update as one CUDA graph and replay it, so that a step costs the host one
    launch; needs a GPU and `overlap_gather: false`, and holds the step's scratch all the time."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which rule updates which weights, and how."""

    qkv_units: QKVUnits = "head"
    """What of attention's input is one matrix: a head, the heads of one key, all of q, or all."""
    split_gate_up: bool = True
    """Whether gate and up, fused in one parameter, are two matrices to the optimizer."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    matrix: GroupConfig
    embedding: GroupConfig
    head: GroupConfig
    scalar: GroupConfig
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Overrides by role; a role that the model does not have is an error. The roles router and
    shared_router have the rule adamw unless they are given another here."""
    auto_rule: AutoRuleConfig | None = None
    """Let each matrix of a spectral rule choose between it and AdamW; null = no."""
    rules: RulesConfig = field(default_factory=RulesConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def settings_for(self, role: str) -> RoleSettings:
        """Rule name, peak learning rate and weight decay of `role`, its override over its group.
        Routers are matrices with a rule of their own, AdamW."""
        group: GroupConfig = getattr(self, group_of(role))
        own = self.roles.get(role, RoleConfig())
        default = "adamw" if role in ROUTERS else group.rule
        return RoleSettings(
            rule=default if own.rule is None else own.rule,
            lr=group.lr if own.lr is None else own.lr,
            weight_decay=group.weight_decay if own.weight_decay is None else own.weight_decay,
        )

    def rule(self, name: str) -> Rule:
        """The configured rule of that name."""
        rule: Rule = getattr(self.rules, name)
        return rule


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run: RunConfig
    seed: int = 1234
    """Seed of initial weights and data order."""
    model: ModelConfig
    """What is trained."""
    pc: PCConfig | None = None
    """PC layers (polynomial weight preconditioning); null = none, `{}` = as in the paper."""
    gram_penalty: GramPenaltyConfig | None = None
    """Off-diagonal Gram penalty added to the loss; null = none, `{}` = as in the paper."""
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)


ROUTERS: Final = ("router", "shared_router")
"""Roles whose matrices score tokens. The published code of SSO sends them to SSO."""


def group_of(role: str) -> Literal["matrix", "embedding", "head", "scalar"]:
    """The section of `optimizer` that `role` belongs to; every role not named here is a matrix."""
    match role:
        case "embedding":
            return "embedding"
        case "head":
            return "head"
        case "gain" | "gamma":
            return "scalar"
        case _:
            return "matrix"


def whole_checks(config: Config) -> Iterator[str]:
    """What does not fit between sections."""
    yield from config_checks.whole(config)
    yield from pc_checks.whole(config)
    yield from config_penalty.whole(config)


SECTION_CHECKS: Final[Mapping[type, Check]] = {
    Config: whole_checks,
    DataConfig: config_checks.data,
    TrainSet: config_checks.train_set,
    ParallelConfig: layout_checks.parallel,
    TrainConfig: config_checks.train,
    ModelConfig: config_checks.model,
    PCConfig: pc_checks.pc,
    PCOverride: pc_checks.override,
    PolynomialConfig: pc_checks.polynomial,
    GramPenaltyConfig: config_penalty.gram_penalty,
    AdaptiveConfig: config_penalty.adaptive,
    ClipConfig: config_checks.clip,
    GroupConfig: config_checks.group,
    RoleConfig: config_checks.group,
    OptimizerConfig: config_checks.optimizer,
    AutoRuleConfig: config_checks.auto_rule,
    DistributedConfig: config_checks.distributed,
    ScheduleConfig: config_checks.schedule,
    CheckpointConfig: config_checks.checkpoint,
    StopConfig: config_checks.stop,
    WatchdogConfig: config_checks.watchdog,
    SpikeConfig: config_checks.spikes,
    LogConfig: config_checks.log,
    MonitorsConfig: config_checks.monitors,
    ValidationConfig: config_checks.validation,
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config that the YAML file `path`, its bases and the `key=value` overrides describe.

    Raises InvalidConfigError, a ConfigError whose `problems` names everything that is wrong.
    """
    binder = Binder(Config, SECTION_CHECKS)
    config = binder.bind(Config, read_merged(Path(path), overrides))
    if config is None:
        raise InvalidConfigError(binder.problems)
    return config


def check(config: Config, world_size: int) -> None:
    """None, if `config` is sound and can run on `world_size` ranks.

    Raises InvalidConfigError whose `problems` names everything that is not so.
    """
    problems = [*walk_checks(config, SECTION_CHECKS), *layout_checks.world(config, world_size)]
    if problems:
        raise InvalidConfigError(problems)


def to_yaml(config: Config) -> str:
    """`config` as YAML with every default written out; loading it gives an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def manual() -> str:
    """docs/configuration.md: every key with its type, default and sentence."""
    return f"{MANUAL_HEAD}\n{markdown_tables(Config)}"


MANUAL_HEAD: Final = """\
# Configuration

Every key of a run config. A file is YAML; `base: other.yaml` (or a list of files), relative to the
file that says it, names what the file is merged over: sections are merged, lists and single values
replaced. `key=value` arguments after `--config FILE` are merged last, and `${section.key}` stands
for another key's value. Paths of data are relative to the working directory.

An unknown key, a wrong type or a contradiction stops the run before it starts; all problems are
reported at once. The resolved config is written to the run folder and is itself a valid config.

This page is generated: `python -m training.config.schema --markdown > docs/configuration.md`.
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the manual of the run config.")
    parser.add_argument("--markdown", action="store_true", required=True, help="as Markdown tables")
    parser.parse_args()
    print(manual(), end="")
