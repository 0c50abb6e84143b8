"""Cross-section checks of a config. Checks within a section are methods of that section.

`BETWEEN` lists the checks that do not depend on the world size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Final

from models.families import FAMILIES, family_checks
from models.section import Check, one_of, problems
from training.config.schema import Config, ParallelConfig

NOT_LINEAR: Final = ("embedding", "head", "gain", "bias", "router", "shared_router")
"""Roles that are not linear layers of a transformer block."""

NOT_IN_A_LAYER: Final = ("embedding", "head", "gain", "bias")
"""Roles that are not matrices of a transformer layer."""


def misnamed(key: str, roles: Iterable[str], options: Sequence[str]) -> Iterator[Check]:
    """Check that each role in `roles` is one of `options`. `key` is the config key that contains
    the roles."""
    for role in roles:
        yield key, role not in options, f"must name {one_of(role, options)}"


def divisible(key: str, size: int, parallel: ParallelConfig, *axes: str) -> Check:
    """Check that `size` is divisible by the product of the axis sizes. `key` is the config key of
    `size`."""
    sizes = [getattr(parallel, axis) for axis in axes]
    product = " * ".join(axes), " * ".join(map(str, sizes)), str(prod(sizes))
    divisor = " = ".join(dict.fromkeys(product))
    return key, size % prod(sizes), f"must be divisible by parallel.{divisor}, got {size}"


def model_checks(config: Config) -> Iterator[Check]:
    """Check the model settings against the rules of the model's family."""
    for key, wrong, rule in family_checks(config.model):
        yield f"model.{key}", wrong, rule


def run_checks(config: Config) -> Iterator[Check]:
    """Check the training, optimizer, checkpoint and profiler settings."""
    train, model, moe = config.train, config.model, config.model.moe
    masked, flash = config.data.document_mask, model.attention_kernel != "auto"
    if model.attention_backend == "sdpa":
        rule = "requires model.attention_backend transformer_engine"
        yield "train.fp8", train.fp8 is not None, rule
    else:
        rule = (
            "requires model.attention_backend sdpa: Transformer Engine fuses these operations "
            "itself"
        )
        yield "train.compile", train.compile not in (None, "auto"), rule
        rule = (
            "must be auto or null with model.attention_backend transformer_engine: Transformer "
            "Engine uses its own kernels"
        )
        yield "train.fused_backward", train.fused_backward == "triton", rule
        rule = (
            "requires model.attention_backend sdpa: document boundaries are not passed to "
            "Transformer Engine"
        )
        yield "data.document_mask", masked, rule
    if flash:
        yield "model.attention_kernel", train.precision != "bf16", "requires train.precision bf16"
        yield "data.document_mask", masked, "requires model.attention_kernel auto"
    routed_only = moe is not None and not moe.dense_layers and not moe.shared_experts
    rule = (
        "must be none or full if every feed-forward block is routed: selective does not recompute "
        "routed experts"
    )
    yield "train.recompute", routed_only and train.recompute == "selective", rule
    yield from misnamed("optimizer.roles", config.optimizer.roles, roles_of(config))
    rule = "must be 0 with checkpoint.interval 0: there is no checkpoint to rewind to"
    yield "spikes.rewinds", config.spikes.rewinds and not config.checkpoint.interval, rule
    profile = config.log.profile
    late = profile is not None and profile.first > train.steps
    yield "log.profile.first", late, f"must be at most train.steps = {train.steps}"


def roles_of(config: Config) -> list[str]:
    """Return the roles of the model's units, in forward order within a layer."""
    model, optimizer = config.model, config.optimizer
    return FAMILIES[model.family].roles(model, optimizer.qkv_units, optimizer.split_gate_up)


def length_checks(config: Config) -> Iterator[Check]:
    """Check that the schedule fits the run length, and that text samples fit the sequence
    length."""
    steps, length = config.train.steps, config.train.sequence_length
    warmup, schedule = config.schedule.warmup_steps, config.schedule
    total = schedule.length(config.train)
    end = f"train.steps = {steps}" if total == steps else f"the run's {total:g} full steps"
    remedy = f"schedule.warmup_steps={steps // 10}, or set train.exit_step={steps}"
    rule = f"must be below {end}, got {warmup}; set {remedy} and increase train.steps"
    yield "schedule.warmup_steps", warmup >= total, rule
    cooldown = schedule.cooldown_steps(total) if schedule.kind == "wsd" else 0
    rule = f"times {total:g} steps must leave room for schedule.warmup_steps = {warmup}"
    yield "schedule.cooldown_fraction", warmup < total < warmup + cooldown, rule
    validation = config.validation
    room = length - validation.prompt_tokens(length)
    long = validation.samples_interval and validation.samples_tokens > room
    rule = (
        f"must be at most {room}, the number of tokens left after the prompt in a sequence of "
        f"{length} tokens"
    )
    yield "validation.samples_tokens", long, rule


def phase_checks(config: Config) -> Iterator[Check]:
    """Check that the data phases start in order and within the run."""
    before, steps, kind = 0, config.train.steps, config.schedule.kind
    for i, (phase, start) in enumerate(zip(config.data.phases, config.phase_starts(), strict=True)):
        key = f"data.phases[{i}].{phase.beginning}"
        yield key, phase.with_decay and kind != "wsd", f"requires schedule.kind wsd, got {kind}"
        rule = (
            f"must start the phase after the previous phase's start (step {before:,}) and "
            f"before train.steps = {steps:,}, got step {start:,}"
        )
        yield key, not before < start < steps, rule
        before = start


def pc_checks(config: Config) -> Iterator[Check]:
    """Check that the settings of PC layers are compatible with other sections."""
    pc, model = config.pc, config.model
    if pc is None:
        return
    rule = "must be null with PC layers: PC layers would change the loaded effective weights"
    yield "checkpoint.initialize_from", config.checkpoint.initialize_from is not None, rule
    options = [role for role in roles_of(config) if role not in NOT_LINEAR]
    yield from misnamed("pc.blocks", pc.blocks or [], options)
    covered = [role for role in options if role in pc.roles]
    for name, override in pc.overrides.items():
        yield from misnamed(f"pc.overrides.{name}.roles", override.roles or [], covered)
        last = (override.layers or (0, 0))[1]
        rule = f"must end below model.layers = {model.layers}, got {last}"
        yield f"pc.overrides.{name}.layers", last >= model.layers, rule
    unsupported = pc.evaluator == "in_graph" and model.attention_backend != "sdpa"
    rule = f"must be materialized with model.attention_backend {model.attention_backend}"
    yield "pc.evaluator", unsupported, rule
    yield _owners(config, "PC layers")


def _owners(config: Config, reason: str) -> Check:
    """Check that `optimizer.distributed.tensor_mode` is `owner`; `reason` names the setting that
    requires this value."""
    key = "optimizer.distributed.tensor_mode"
    return key, config.optimizer.distributed.tensor_mode != "owner", f"must be owner with {reason}"


def penalty_checks(config: Config) -> Iterator[Check]:
    """Check that the settings of the Gram penalty are compatible with other sections."""
    section, pc = config.gram_penalty, config.pc
    if section is None:
        return
    options = [role for role in roles_of(config) if role not in NOT_IN_A_LAYER]
    yield from misnamed("gram_penalty.roles", section.roles, options)
    yield _owners(config, "gram_penalty")
    in_graph = pc.roles if pc is not None and pc.evaluator == "in_graph" else ()
    roles = ", ".join(role for role in section.roles if role in in_graph)
    rule = f"must be materialized for PC layers in gram_penalty.roles, got in_graph for {roles}"
    yield "pc.evaluator", roles, rule


def layout_checks(config: Config) -> Iterator[Check]:
    """Check that the model can be split as the layout requires."""
    model, parallel, length = config.model, config.parallel, config.train.sequence_length
    tensor, context, moe = parallel.tensor, parallel.context, model.moe
    sizes = {"heads": model.heads, "kv_heads": model.query_groups, "ffn": model.ffn}
    if model.vocab_size is not None:
        sizes["vocab_size, padded to a multiple of model.vocab_multiple,"] = model.padded_vocab
    for key, size in sizes.items():
        yield divisible(f"model.{key}", size, parallel, "tensor")
    yield _stages(config)
    halves = 2 * context if context > 1 else 1
    pieces = lcm(halves, context * tensor if parallel.sequence_parallel else 1)
    axes = f"parallel.context = {context} and parallel.tensor = {tensor}"
    yield "train.sequence_length", length % pieces, f"must be divisible by {pieces} for {axes}"
    if moe is None:
        rule = f"must be 1 for model.family {model.family}"
        yield "parallel.expert", parallel.expert > 1, rule
        yield "parallel.expert_tensor", parallel.expert_tensor > 1, rule
        return
    yield divisible("model.moe.experts", moe.experts, parallel, "expert")
    yield divisible("model.moe.expert_ffn", moe.expert_ffn, parallel, "expert_tensor")
    key = "model.moe.shared_experts * model.moe.expert_ffn"
    yield divisible(key, moe.shared_experts * moe.expert_ffn, parallel, "tensor")
    rule = f"must be true or null for model.family {model.family} with tensor > 1"
    yield "parallel.sequence", tensor > 1 and not parallel.sequence_parallel, rule


def _stages(config: Config) -> Check:
    """Check that the remaining layers divide evenly among the pipeline stages whose number of
    layers is not configured."""
    parallel, layers = config.parallel, config.model.layers
    keys = ("first_stage_layers", "last_stage_layers")
    sizes = {key: size for key in keys if (size := getattr(parallel, key)) is not None}
    if not sizes or parallel.pipeline == 1:
        return divisible("model.layers", layers, parallel, "pipeline", "virtual_pipeline")
    others, rest = parallel.pipeline - len(sizes), layers - sum(sizes.values())
    if not others:
        return "model.layers", rest, f"must be parallel.{' + '.join(keys)} = {layers - rest}"
    stages = " and ".join(f"parallel.{key} = {size}" for key, size in sizes.items())
    share = (
        "at least one layer for the remaining stage"
        if others == 1
        else f"the same number of layers, at least one, for each of the {others} remaining stages"
    )
    rule = f"must leave {share}, given {stages}"
    return "model.layers", rest < others or rest % others, rule


BETWEEN = (
    model_checks, run_checks, length_checks, phase_checks, layout_checks, pc_checks, penalty_checks,
)  # fmt: skip
"""Cross-section checks that do not depend on the world size."""


def world(config: Config, world_size: int, step: int, tokens: int) -> Iterator[str]:
    """Yield the problems found by `world_checks`, with the nearest valid values."""
    lines = list(problems(config, world_checks(config, world_size, step, tokens)))
    if not lines:
        return
    train, parallel = config.train, config.parallel
    passes = 1 if parallel.virtual_pipeline == 1 else parallel.pipeline
    unit = train.micro_batch * max(1, world_size // parallel.model_ranks) * passes
    below = train.global_batch // unit * unit
    batches = [size for size in (below, below + unit) if size]
    legal = {
        "numbers of ranks": _nearest(legal_ranks(config), world_size),
        "train.micro_batch": _nearest(legal_micro_batches(config, world_size), train.micro_batch),
        "train.global_batch": [n for n in batches if fits(config, world_size, global_batch=n)],
    }
    shown = [f"{what} {' and '.join(map(str, near))}" for what, near in legal.items() if near]
    nearby = f"nearest valid values: {'; '.join(shown)}" if shown else "no nearby value is valid"
    for line in lines:
        yield f"{line}; {nearby}"


def fits(config: Config, world_size: int, **train: int) -> bool:
    """Return whether `config` can run on `world_size` ranks. The keyword arguments `train` override
    keys in section `train` of the config."""
    changed = replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]
    return holds(world_checks(changed, world_size))


def holds(checks: Iterable[Check]) -> bool:
    """Return whether all checks pass."""
    return not any(wrong for _, wrong, _ in checks)


def legal_ranks(config: Config) -> list[int]:
    """Return the world sizes on which `config` can run, in ascending order."""
    train, ranks = config.train, config.parallel.model_ranks
    copies = divisors(train.global_batch // train.micro_batch)
    return [ranks * each for each in copies if fits(config, ranks * each)]


def legal_micro_batches(config: Config, world_size: int) -> list[int]:
    """Return the valid micro-batch sizes for `config` on `world_size` ranks, in ascending order."""
    options = divisors(config.train.global_batch)
    return [size for size in options if fits(config, world_size, micro_batch=size)]


def divisors(number: int) -> list[int]:
    """Return all divisors of `number` in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _nearest(legal: list[int], number: int) -> list[int]:
    """Return the neighbours of `number` in the ascending list `legal`: the largest element that is
    at most `number`, and the smallest element that is at least `number`."""
    below = [each for each in legal if each <= number][-1:]
    above = [each for each in legal if each >= number][:1]
    return sorted({*below, *above})


def world_checks(
    config: Config, world_size: int, step: int = 0, tokens: int = 0
) -> Iterator[Check]:
    """Check the layout and batch sizes on `world_size` ranks. If there is a batch ramp, only the
    stages that remain after `step` steps and `tokens` tokens are checked."""
    parallel, train, ranks = config.parallel, config.train, config.parallel.model_ranks
    profile = config.log.profile
    missing = profile is not None and max(profile.ranks) >= world_size
    yield "log.profile.ranks", missing, f"must be below the number of ranks = {world_size}"
    yield divisible("the number of ranks", world_size, parallel, "tensor", "pipeline", "context")
    if world_size % ranks:
        return
    stage, of_stage = "the number of ranks per pipeline stage", world_size // parallel.pipeline
    yield divisible(stage, of_stage, parallel, "expert", "expert_tensor")
    copies = world_size // ranks
    per_pass = train.micro_batch * copies
    keys = {stage.batch: f"train.batch_ramp[{i}].batch" for i, stage in enumerate(train.batch_ramp)}
    batches = [part.batch for part in train.equal_steps(step, tokens)]
    for batch in dict.fromkeys([*batches, train.global_batch]):
        key, (passes, rest) = keys.get(batch, "train.global_batch"), divmod(batch, per_pass)
        rule = (
            "must be divisible by train.micro_batch times the data-parallel size = "
            f"{train.micro_batch} * {copies} = {per_pass}, got {batch}"
        )
        yield key, rest, rule
        uneven = parallel.virtual_pipeline > 1 and rest == 0 and passes % parallel.pipeline
        rule = (
            f"must yield a number of micro-batches divisible by parallel.pipeline = "
            f"{parallel.pipeline} for the interleaved schedule, got {passes} for batch {batch}"
        )
        yield key, uneven, rule
