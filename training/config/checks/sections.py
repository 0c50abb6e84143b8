"""What must hold of a run config beyond the types of its keys.

One function per section, each a generator of sentences that begin with the key they are about;
`whole` looks across sections. Layouts are looked at in training.config.checks.layout.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from models.config import LatentConfig, ModelConfig, MoEConfig
from spectral.rules import RULES, SpectralSphereRule
from training.config.schema.checks import layout as layout_checks
from training.config.checks.sentences import at_least, named, positive
from training.config.checks.deepseek import deepseek

if TYPE_CHECKING:
    from training.config.schema import schema as schema
    from training.config.schema import running as config_running

# Names of models.families.FAMILIES, whose modules import the engine: reading a config does not.
FAMILIES = ("llama", "qwen3", "deepnet", "gpt", "moe", "deepseek")
MIXTURES = ("moe", "deepseek")

# What the families are made of; gpt leaves it to the config, and moe the query-key norms.
QK_NORM = {"llama": False, "qwen3": True, "deepnet": True, "deepseek": False}
ACTIVATIONS = dict.fromkeys(("llama", "qwen3", "deepnet", "moe", "deepseek"), "swiglu")

# Set names become parts of metric names.
SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def model(section: ModelConfig) -> Iterator[str]:
    """What is wrong with the shape of the model."""
    if section.family not in FAMILIES:
        yield f"family must be {named(section.family, FAMILIES)}"
    yield from at_least(section, 1, "layers", "hidden", "heads", "ffn", "vocab_multiple")
    yield from at_least(section, 1, "kv_heads", "head_dim", "vocab_size")
    yield from positive(section, "rope_base", "norm_epsilon")
    if section.heads < 1 or section.query_groups < 1:
        return
    if section.heads % section.query_groups:
        yield f"kv_heads must divide heads = {section.heads}, got {section.query_groups}"
    if section.latent is not None:
        yield from (f"latent.{line}" for line in _latent(section.latent))
    elif section.head_dim is None and section.hidden % section.heads:
        yield f"heads must divide hidden = {section.hidden}, got {section.heads} (or set head_dim)"
    elif section.head_size % 2:
        yield f"head_dim must be even for rotary positions, got {section.head_size}"
    yield from _architecture(section)


def _architecture(section: ModelConfig) -> Iterator[str]:
    """What does not belong to the family."""
    family = section.family
    qk_norm = QK_NORM.get(family, section.qk_norm)
    if section.qk_norm != qk_norm:
        wanted, got = str(qk_norm).lower(), str(section.qk_norm).lower()
        yield f"qk_norm must be {wanted} for family {family}, got {got}"
    activation = ACTIVATIONS.get(family, section.activation)
    if section.activation != activation:
        yield f"activation must be {activation} for family {family}, got {section.activation}"
    if family in MIXTURES and section.attention_backend != "sdpa":
        yield f"attention_backend must be sdpa for family {family}, got {section.attention_backend}"
    yield from _belongs(section, "latent", family == "deepseek")
    yield from _belongs(section, "moe", family in MIXTURES)
    if family == "deepseek":
        yield from deepseek(section)
    if section.moe is not None and family in MIXTURES:
        yield from (f"moe.{line}" for line in _mixture(section.moe, section.layers))


def _belongs(section: ModelConfig, key: str, wanted: bool) -> Iterator[str]:
    """Whether the section `key` is there exactly if the family has what it describes."""
    if wanted and getattr(section, key) is None:
        yield f"{key} must be a section for family {section.family}, got null"
    elif not wanted and getattr(section, key) is not None:
        yield f"{key} must be null for family {section.family}, got a section"


def _latent(section: LatentConfig) -> Iterator[str]:
    """What is wrong with the sizes of latent attention."""
    yield from at_least(section, 1, "query_rank", "kv_rank", "nope_head_dim", "value_head_dim")
    yield from at_least(section, 2, "rope_head_dim")
    if section.rope_head_dim % 2:
        yield f"rope_head_dim must be even for rotary positions, got {section.rope_head_dim}"


def _mixture(section: MoEConfig, layers: int) -> Iterator[str]:
    """What is wrong with the mixture-of-experts layers of a model of `layers` layers."""
    yield from at_least(section, 1, "experts", "top_k", "expert_ffn", "expert_groups", "top_groups")
    yield from at_least(section, 0, "shared_experts", "dense_layers", "expert_bias_rate")
    yield from at_least(section, 0, "sequence_aux_loss", "global_aux_loss", "z_loss")
    yield from positive(section, "routed_scale")
    if section.top_k > section.experts:
        yield f"top_k must be at most experts = {section.experts}, got {section.top_k}"
    if section.expert_groups > 1:
        yield from _expert_groups(section)
    elif section.top_groups != 1:
        yield f"top_groups must be 1 without expert_groups, got {section.top_groups}"
    if section.dense_layers >= layers:
        yield f"dense_layers must be below layers = {layers}, got {section.dense_layers}"
    if section.shared_gate and section.shared_experts < 1:
        yield "shared_gate must be false without shared_experts, got true"
    if section.expert_bias and section.score != "sigmoid":
        yield f"expert_bias must be false with score {section.score}, got true"


def _expert_groups(section: MoEConfig) -> Iterator[str]:
    """What is wrong with routing that is limited to groups of experts."""
    groups, used = section.expert_groups, section.top_groups
    if section.experts % groups:
        yield f"expert_groups must divide experts = {section.experts}, got {groups}"
        return
    each = section.experts // groups
    if not 1 <= used <= groups:
        yield f"top_groups must be in [1, expert_groups = {groups}], got {used}"
    elif not used <= section.top_k <= used * each:
        yield (
            f"top_k must be from top_groups = {used} to the {used * each} experts of so many "
            f"groups, got {section.top_k}"
        )


def data(section: "schema.DataConfig") -> Iterator[str]:
    """What is wrong with the sets."""
    yield from at_least(section, 0, "workers")
    if not section.train:
        yield "train must name at least one set, got none"
    for kind in ("train", "validation"):
        for name in getattr(section, kind):
            if not SET_NAME.fullmatch(name):
                yield f"{kind} has a set {name!r}; names are letters, digits, '_', '-' and '.'"


def train_set(section: "schema.TrainSet") -> Iterator[str]:
    """What is wrong with one training set."""
    yield from positive(section, "weight")


def train(section: "schema.TrainConfig") -> Iterator[str]:
    """What is wrong with the length of the run or the sizes of its batches."""
    yield from at_least(section, 1, "steps", "exit_step", "global_batch", "micro_batch")
    yield from at_least(section, 1, "sequence_length", "loss_chunk")
    yield from at_least(section, 0, "max_skipped_steps")
    if section.fp8 is not None and section.precision != "bf16":
        yield f"fp8 needs precision bf16, got {section.fp8} with precision {section.precision}"
    if section.exit_step is not None and section.exit_step > section.steps:
        yield f"exit_step must be at most steps = {section.steps}, got {section.exit_step}"


def clip(section: "schema.ClipConfig") -> Iterator[str]:
    """What is wrong with clipping."""
    yield from positive(section, "max_norm")


def group(section: "schema.GroupConfig | schema.RoleConfig") -> Iterator[str]:
    """What is wrong with the settings of a group, or with a role's overrides of them."""
    if section.rule is not None and section.rule not in RULES:
        yield f"rule must be {named(section.rule, RULES)}"
    yield from at_least(section, 0, "lr", "weight_decay")
    if (section.lr or 0) * (section.weight_decay or 0) >= 1:
        yield (
            f"weight_decay times lr must be below 1, "
            f"got {section.weight_decay} times {section.lr}: one step would erase the weight"
        )


def optimizer(section: "schema.OptimizerConfig") -> Iterator[str]:
    """What is wrong with the routing of roles to rules."""
    rule = section.settings_for("gain").rule
    if rule in RULES and RULES[rule].whole_matrix:
        place = "roles.gain.rule" if "gain" in section.roles else "scalar.rule"
        yield f"{place} must be an elementwise rule, as gains are vectors, got {rule!r}"
    matrix = section.matrix
    if section.auto_rule is not None and matrix.rule in RULES:
        if not RULES[matrix.rule].whole_matrix:
            yield f"auto_rule needs a spectral matrix.rule, got {matrix.rule}"
        elif not matrix.lr > 0:
            yield f"auto_rule needs matrix.lr above 0, got {matrix.lr}"
    sphere = section.rules.spectral_sphere
    early = isinstance(sphere, SpectralSphereRule) and sphere.early_exit
    if early and section.distributed.cuda_graph:
        yield (
            "rules.spectral_sphere.early_exit must not be true with distributed.cuda_graph, as it "
            "waits for the device"
        )


def auto_rule(section: "config_running.AutoRuleConfig") -> Iterator[str]:
    """What is wrong with the choice of rules."""
    yield from positive(section, "lr")
    yield from at_least(section, 0, "weight_decay", "hysteresis")
    yield from at_least(section, 1, "interval")
    if not 0 <= section.smoothing < 1:
        yield f"smoothing must be in [0, 1), got {section.smoothing}"


def distributed(section: "schema.DistributedConfig") -> Iterator[str]:
    """What is wrong with how the optimizer is spread."""
    yield from at_least(section, 1, "bucket_elements", "step_groups")
    if section.cuda_graph and section.overlap_gather:
        yield "overlap_gather must be false with cuda_graph, which ends with the step, got true"


def schedule(section: "config_running.ScheduleConfig") -> Iterator[str]:
    """What is wrong with the schedule by itself."""
    yield from at_least(section, 0, "warmup_steps")
    if not 0 <= section.min_ratio <= 1:
        yield f"min_ratio must be in [0, 1], got {section.min_ratio}"
    if not 0 < section.cooldown_fraction <= 1:
        yield f"cooldown_fraction must be in (0, 1], got {section.cooldown_fraction}"


def checkpoint(section: "config_running.CheckpointConfig") -> Iterator[str]:
    """What is wrong with checkpointing."""
    yield from at_least(section, 0, "interval")
    yield from at_least(section, 1, "keep_last", "keep_every")


def stop(section: "config_running.StopConfig") -> Iterator[str]:
    """What is wrong with stopping early."""
    yield from at_least(section, 0, "slurm_margin_seconds")


def watchdog(section: "config_running.WatchdogConfig") -> Iterator[str]:
    """What is wrong with watching the run."""
    yield from positive(section, "heartbeat_seconds", "hang_seconds")


def spikes(section: "config_running.SpikeConfig") -> Iterator[str]:
    """What is wrong with the policy for spikes."""
    yield from positive(section, "deviations")
    yield from at_least(section, 2, "window")
    yield from at_least(section, 0, "rewinds")


def log(section: "config_running.LogConfig") -> Iterator[str]:
    """What is wrong with logging."""
    yield from at_least(section, 1, "interval")


def monitors(section: "config_running.MonitorsConfig") -> Iterator[str]:
    """What is wrong with monitoring."""
    yield from at_least(section, 0, "interval")
    yield from at_least(section, 2, "noise_samples")
    yield from positive(section, "activation_gib")


def validation(section: "config_running.ValidationConfig") -> Iterator[str]:
    """What is wrong with validation."""
    yield from at_least(section, 0, "interval")
    yield from at_least(section, 1, "samples")


def whole(config: "schema.Config") -> Iterator[str]:
    """What does not fit between sections, on any number of ranks."""
    if config.train.fp8 is not None and config.model.attention_backend != "transformer_engine":
        yield (
            "train.fp8 needs model.attention_backend transformer_engine, "
            f"got {config.train.fp8} with {config.model.attention_backend}"
        )
    if config.train.compile is not None and config.model.attention_backend != "sdpa":
        yield (
            "train.compile needs model.attention_backend sdpa, as Transformer Engine's norms and "
            f"rotary positions are fused, got {config.model.attention_backend}"
        )
    if config.seed < 0:
        yield f"seed must be at least 0, got {config.seed}"
    yield from _lengths(config)
    yield from _roles(config)
    if config.spikes.rewinds and not config.checkpoint.interval:
        yield f"spikes.rewinds needs checkpoints, got {config.spikes.rewinds} with interval 0"
    if config.optimizer.auto_rule is not None:
        yield from _auto_rule(config)
    if min(config.parallel.tensor, config.parallel.pipeline, config.parallel.virtual_pipeline) >= 1:
        yield from layout_checks.whole(config)


def _auto_rule(config: "schema.Config") -> Iterator[str]:
    """Whether the choice of rules is about whole matrices and the weights that the model multiplies
    by, and keeps what it says it keeps."""
    distributed = config.optimizer.distributed
    if distributed.tensor_mode == "shardwise":
        yield (
            "optimizer.distributed.tensor_mode must be home or duplicated with optimizer.auto_rule,"
            " as nr(G) >= st(A) is of whole matrices, got shardwise"
        )
    if distributed.momentum_dtype == "bf16":
        yield (
            "optimizer.distributed.momentum_dtype must be null or fp32 with optimizer.auto_rule, "
            "as both rules' state is kept in the masters' type, got bf16"
        )
    if config.pc is not None and config.pc.evaluator == "in_graph":
        yield (
            "pc.evaluator must be materialized with optimizer.auto_rule, as nr(G) >= st(A) is of "
            "the gradient of PC(W), got in_graph"
        )


def _roles(config: "schema.Config") -> Iterator[str]:
    """Whether the roles with settings of their own are roles of the model."""
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    for role in optimizer.roles:
        if role not in roles:
            yield f"optimizer.roles must name {named(role, roles)}"


def _lengths(config: "schema.Config") -> Iterator[str]:
    """Whether the parts of the schedule fit into the run."""
    steps, schedule = config.train.steps, config.schedule
    warmup = schedule.warmup_steps
    if warmup >= steps >= 1:
        yield f"schedule.warmup_steps must be below train.steps = {steps}, got {warmup}"
    elif schedule.kind == "wsd" and warmup + schedule.cooldown_steps(steps) > steps:
        yield (
            f"schedule.cooldown_fraction = {schedule.cooldown_fraction} of {steps} steps and "
            f"schedule.warmup_steps = {warmup} must not overlap"
        )


def roles_of(model: ModelConfig, qkv_units: str, split_gate_up: bool) -> tuple[str, ...]:
    """The roles of a model, in the order of a layer's forward."""
    attention = _attention_roles(model.latent, qkv_units == "fused")
    gated = ("gate", "up") if split_gate_up else ("gate_up",)
    feed_forward = (*gated, "down") if model.gated else ("up", "down")
    if model.moe is not None:
        feed_forward = _mixture_roles(model.moe, feed_forward)
    return ("embedding", *attention, "o", *feed_forward, "gain", "head")


def _attention_roles(latent: LatentConfig | None, fused: bool) -> tuple[str, ...]:
    """The roles of what makes queries, keys and values."""
    if latent is None:
        return ("qkv",) if fused else ("q", "k", "v")
    queries = ("q",) if latent.query_rank is None else ("q_a", "q_b")
    return (*queries, "kv_a", *(("kv_b",) if fused else ("k_b", "v_b")))


def _mixture_roles(moe: MoEConfig, block: tuple[str, ...]) -> tuple[str, ...]:
    """The roles of dense and mixture-of-experts layers, given those of one feed-forward block."""
    dense = block if moe.dense_layers else ()
    shared = tuple(f"shared_{role}" for role in block) if moe.shared_experts else ()
    gate = ("shared_router",) if moe.shared_gate else ()
    return (*dense, *shared, *gate, "router", *(f"expert_{role}" for role in block))
