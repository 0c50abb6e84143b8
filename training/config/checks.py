"""Checks between the sections of a config; each section checks itself.

Each is a generator of sentences that begin with the key they are about. Start with
`problems_between`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from models.config import ModelConfig, MoEConfig
from models.families import FAMILIES, family_problems
from models.layout import QKVUnits
from models.section import Checks, ignored, named
from spectral.rules import RULES
from training.config.schema import Config

SECTION_CHECKS: Final[Checks] = {ModelConfig: family_problems}
"""Checks of section classes that the classes cannot make themselves."""

NOT_LINEAR: Final = ("embedding", "head", "gain", "router", "shared_router")
"""Roles that are not linear layers of a block."""

NOT_IN_A_LAYER: Final = ("embedding", "head", "gain")
"""Roles that are not matrices of a layer."""


def problems_between(config: Config) -> Iterator[str]:
    """Yield what is wrong between the sections of `config`, on any number of ranks."""
    yield from run_problems(config)
    yield from _layout(config)
    yield from _pc(config)
    yield from _gram_penalty(config)


def roles_of(model: ModelConfig, qkv_units: QKVUnits, split_gate_up: bool) -> list[str]:
    """Return the roles of a model's units, in the order of a layer's forward pass."""
    return FAMILIES[model.family].roles(model, qkv_units, split_gate_up)


def run_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong between training, optimizer, schedule, checkpoints and model."""
    if config.train.fp8 is not None and config.model.attention_backend != "transformer_engine":
        yield (
            "train.fp8 needs model.attention_backend transformer_engine, "
            f"got {config.train.fp8} with {config.model.attention_backend}"
        )
    if config.train.compile not in (None, "auto") and config.model.attention_backend != "sdpa":
        yield (
            "train.compile needs model.attention_backend sdpa, as Transformer Engine fuses the "
            f"same operations, got {config.model.attention_backend}"
        )
    yield from _lengths(config)
    yield from _without_effect(config)
    yield from _roles(config)
    if config.spikes.rewinds and not config.checkpoint.interval:
        yield (
            "spikes.rewinds must be 0 with checkpoint.interval 0, which saves nothing to return "
            f"to, got {config.spikes.rewinds}"
        )
    yield from _rate_factors(config)


def _rate_factors(config: Config) -> Iterator[str]:
    """Yield what is wrong with the factors of learning rates, by layer and by role."""
    optimizer, layers = config.optimizer, config.model.layers
    rates = optimizer.layer_rates
    if rates is not None and rates.factors is not None and len(rates.factors) != layers:
        yield (
            f"optimizer.layer_rates.factors must have model.layers = {layers} entries, "
            f"got {len(rates.factors)}"
        )
        return
    for role in roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up):
        settings = optimizer.settings_for(role)
        largest = max(optimizer.rate_factor(role, layer) for layer in (None, *range(layers)))
        decay = settings.lr * settings.weight_decay
        if largest > 1 and decay < 1 <= largest * decay:
            yield (
                "optimizer.layer_rates and lr_factor must keep lr times weight_decay below 1, "
                f"got {settings.lr} times {largest} times {settings.weight_decay} for role {role}: "
                "one step would erase the weight"
            )


def _roles(config: Config) -> Iterator[str]:
    """Yield the roles with settings of their own that the model does not have."""
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    for role in optimizer.roles:
        if role not in roles:
            yield f"optimizer.roles must name {named(role, roles)}"


def _without_effect(config: Config) -> Iterator[str]:
    """Yield settings that another section leaves without effect."""
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    rules = {optimizer.settings_for(role).rule for role in roles}
    if not any(rule in RULES and RULES[rule].whole_matrix for rule in rules):
        when = "where no role has a rule of whole matrices"
        yield from ignored(optimizer.clip, "matrix_roles", when=when, prefix="optimizer.clip.")
    moe = config.model.moe
    routed_only = moe is not None and not moe.dense_layers and not moe.shared_experts
    if config.train.recompute == "selective" and routed_only:
        yield (
            "train.recompute must be none or full for a model whose feed-forward blocks are all "
            "routed experts, which selective leaves alone, got selective"
        )


def _lengths(config: Config) -> Iterator[str]:
    """Yield what of the schedule does not fit into the run."""
    validation, length = config.validation, config.train.sequence_length
    room = length - validation.prompt_tokens(length)
    if validation.samples_interval > 0 and validation.samples_tokens > room:
        yield (
            f"validation.samples_tokens must be at most {room}, what a sequence of {length} has "
            f"after the prompt, got {validation.samples_tokens}"
        )
    steps, schedule = config.train.steps, config.schedule
    warmup = schedule.warmup_steps
    if warmup >= steps >= 1:
        yield f"schedule.warmup_steps must be below train.steps = {steps}, got {warmup}"
    elif schedule.kind == "wsd" and warmup + schedule.cooldown_steps(steps) > steps:
        yield (
            f"schedule.cooldown_fraction = {schedule.cooldown_fraction} of {steps} steps and "
            f"schedule.warmup_steps = {warmup} must not overlap"
        )


def _pc(config: Config) -> Iterator[str]:
    """Yield what is wrong between PC layers and other sections."""
    section = config.pc
    if section is None:
        return
    source = config.checkpoint.initialize_from
    if source is not None:
        yield (
            "checkpoint.initialize_from must be null with pc, as PC layers would change the "
            f"effective weights that it loads, got {source}"
        )
    optimizer = config.optimizer
    options = [
        role
        for role in roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
        if role not in NOT_LINEAR
    ]
    for role in section.blocks or []:
        if role not in options:
            yield f"pc.blocks must name {named(role, options)}"
    covered = [role for role in options if role in section.roles]
    for name, each in section.overrides.items():
        for role in each.roles or []:
            if role not in options:
                yield f"pc.overrides.{name}.roles must name {named(role, options)}"
            elif role not in covered:
                yield f"pc.overrides.{name}.roles must name PC layers, {named(role, covered)}"
        if each.layers is not None and each.layers[1] >= config.model.layers:
            yield (
                f"pc.overrides.{name}.layers must end below model.layers = "
                f"{config.model.layers}, got {each.layers[1]}"
            )
    if section.evaluator == "in_graph" and config.model.attention_backend != "sdpa":
        yield (
            "pc.evaluator must be materialized with model.attention_backend "
            f"{config.model.attention_backend}, got in_graph"
        )
    if optimizer.distributed.tensor_mode != "owner":
        yield (
            "optimizer.distributed.tensor_mode must be owner with PC layers, "
            f"got {optimizer.distributed.tensor_mode}"
        )


def _gram_penalty(config: Config) -> Iterator[str]:
    """Yield what is wrong between the penalty and other sections."""
    section = config.gram_penalty
    if section is None:
        return
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    options = [role for role in roles if role not in NOT_IN_A_LAYER]
    for role in section.roles:
        if role not in options:
            yield f"gram_penalty.roles must name {named(role, options)}"
    if optimizer.distributed.tensor_mode != "owner":
        yield (
            "optimizer.distributed.tensor_mode must be owner with gram_penalty, "
            f"got {optimizer.distributed.tensor_mode}"
        )
    if config.pc is not None and config.pc.evaluator == "in_graph":
        both = [role for role in section.roles if role in config.pc.roles]
        if both:
            yield (
                "pc.evaluator must be materialized where gram_penalty.roles have PC layers, as the "
                f"penalty is on the effective weight, got in_graph for {', '.join(both)}"
            )


def _layout(config: Config) -> Iterator[str]:
    """Yield what of the model cannot be split as the layout says."""
    model, parallel = config.model, config.parallel
    if min(parallel.tensor, parallel.pipeline, parallel.virtual_pipeline) < 1:
        return  # reported by the section
    tensor, stages = parallel.tensor, parallel.pipeline * parallel.virtual_pipeline
    sizes = {"heads": model.heads, "kv_heads": model.query_groups, "ffn": model.ffn}
    if model.vocab_size is not None and model.vocab_multiple >= 1:
        sizes["vocab_size, padded to a multiple of model.vocab_multiple,"] = model.padded_vocab
    for key, size in sizes.items():
        if size % tensor:
            yield f"model.{key} must be divisible by parallel.tensor = {tensor}, got {size}"
    if parallel.first_stage_layers is not None or parallel.last_stage_layers is not None:
        yield from _uneven_stages(config)
    elif model.layers % stages:
        yield (
            "model.layers must be divisible by parallel.pipeline * parallel.virtual_pipeline = "
            f"{stages}, got {model.layers}"
        )
    if parallel.sequence_parallel and config.train.sequence_length % tensor:
        yield (
            f"train.sequence_length must be divisible by parallel.tensor = {tensor} under sequence "
            f"parallelism, got {config.train.sequence_length}"
        )
    yield from _context(config)
    if model.moe is None:
        yield from _single(config, "expert")
        yield from _single(config, "expert_tensor")
    else:
        yield from _expert_layout(config, model.moe)


def _uneven_stages(config: Config) -> Iterator[str]:
    """Yield why the layers cannot be divided over stages of given sizes and the others."""
    parallel, layers = config.parallel, config.model.layers
    keys = ("first_stage_layers", "last_stage_layers")
    given = {key: size for key in keys if (size := getattr(parallel, key)) is not None}
    if parallel.pipeline == 1 or parallel.virtual_pipeline > 1 or min(given.values()) < 1:
        return  # reported by the section
    others, rest = parallel.pipeline - len(given), layers - sum(given.values())
    if others == 0 and rest:
        yield f"model.layers must be parallel.{' + '.join(keys)} = {layers - rest}, got {layers}"
    elif others and (rest < others or rest % others):
        fixed = " and ".join(f"parallel.{key} = {size}" for key, size in given.items())
        yield (
            f"model.layers must leave the other {others} stages equally many layers, at least "
            f"one, beside {fixed}, got {layers}"
        )


def _context(config: Config) -> Iterator[str]:
    """Yield why sequences cannot be split over parallel.context ranks."""
    tensor, context = config.parallel.tensor, config.parallel.context
    if context <= 1:
        return
    length = config.train.sequence_length
    pieces = 2 * context
    if config.parallel.sequence_parallel and length % pieces == 0:
        pieces = context * tensor
    if length % pieces:
        yield (
            f"train.sequence_length must be divisible by {pieces} for parallel.context = {context} "
            f"and parallel.tensor = {tensor}, got {length}"
        )


def _expert_layout(config: Config, moe: MoEConfig) -> Iterator[str]:
    """Yield why experts cannot be split over parallel.expert and expert_tensor ranks."""
    parallel = config.parallel
    if parallel.expert >= 1 and moe.experts % parallel.expert:
        yield (
            f"model.moe.experts must be divisible by parallel.expert = {parallel.expert}, "
            f"got {moe.experts}"
        )
    if parallel.expert_tensor >= 1 and moe.expert_ffn % parallel.expert_tensor:
        yield (
            "model.moe.expert_ffn must be divisible by parallel.expert_tensor = "
            f"{parallel.expert_tensor}, got {moe.expert_ffn}"
        )
    width = moe.shared_experts * moe.expert_ffn
    if width % parallel.tensor:
        yield (
            "model.moe.shared_experts * model.moe.expert_ffn must be divisible by "
            f"parallel.tensor = {parallel.tensor}, got {width}"
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence must be true or null for model.family {config.model.family} with "
            "tensor > 1, got false"
        )


def _single(config: Config, key: str) -> Iterator[str]:
    """Yield a line if an axis of parallelism that the family does not have is not 1."""
    if getattr(config.parallel, key) > 1:
        yield (
            f"parallel.{key} must be 1 for model.family {config.model.family}, "
            f"got {getattr(config.parallel, key)}"
        )


def world(config: Config, world_size: int) -> Iterator[str]:
    """Yield what is wrong on `world_size` ranks, and what would be right nearby."""
    found = list(_world_problems(config, world_size))
    if found:
        yield from (f"{problem}; {_nearby(config, world_size)}" for problem in found)


def layout_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the layout and the batch on `world_size` ranks."""
    yield from _layout(config)
    yield from _world_problems(config, world_size)


def legal_ranks(config: Config) -> list[int]:
    """Return the numbers of ranks that `config` can run on, ascending."""
    train, ranks = config.train, config.parallel.model_ranks
    worlds = (ranks * copies for copies in divisors(train.global_batch // train.micro_batch))
    return [each for each in worlds if not any(_world_problems(config, each))]


def legal_micro_batches(config: Config, world_size: int) -> list[int]:
    """Return the micro-batches with which `config` can run on `world_size` ranks, ascending."""
    options = divisors(config.train.global_batch)
    trains = ((each, replace(config.train, micro_batch=each)) for each in options)
    return [
        each
        for each, train in trains
        if not any(_world_problems(replace(config, train=train), world_size))
    ]


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _nearby(config: Config, world_size: int) -> str:
    """Name the legal numbers of ranks and the legal batches that are nearest."""
    train, ranks = config.train, config.parallel.model_ranks
    found = {
        "numbers of ranks": _nearest(legal_ranks(config), world_size),
        "train.micro_batch": _nearest(legal_micro_batches(config, world_size), train.micro_batch),
    }
    if world_size % ranks == 0:
        passes = 1 if config.parallel.virtual_pipeline == 1 else config.parallel.pipeline
        unit = train.micro_batch * (world_size // ranks) * passes
        below = train.global_batch // unit * unit
        batches = [each for each in (below, below + unit) if each]
        trains = ((each, replace(train, global_batch=each)) for each in batches)
        found["train.global_batch"] = [
            each
            for each, changed in trains
            if not any(_world_problems(replace(config, train=changed), world_size))
        ]
    named = [f"{what} {' and '.join(map(str, near))}" for what, near in found.items() if near]
    return f"legal nearby: {'; '.join(named)}" if named else "no number nearby is legal"


def _nearest(legal: list[int], wanted: int) -> list[int]:
    """Return the last of ascending numbers up to `wanted` and the first from there on."""
    below = [each for each in legal if each <= wanted][-1:]
    above = [each for each in legal if each >= wanted][:1]
    return sorted({*below, *above})


def _world_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield what is wrong on `world_size` ranks."""
    parallel, train = config.parallel, config.train
    ranks = parallel.model_ranks
    if ranks < 1 or train.micro_batch < 1:
        return  # reported by the sections
    if world_size % ranks:
        yield (
            f"the number of ranks must be divisible by parallel.tensor * pipeline * context = "
            f"{parallel.tensor} * {parallel.pipeline} * {parallel.context} = {ranks}, "
            f"got {world_size}"
        )
        return
    stage = world_size // parallel.pipeline
    sharing = parallel.expert * parallel.expert_tensor
    if parallel.expert >= 1 and parallel.expert_tensor >= 1 and stage % sharing:
        yield (
            "the number of ranks of a pipeline stage must be divisible by parallel.expert * "
            f"expert_tensor = {parallel.expert} * {parallel.expert_tensor} = {sharing}, got {stage}"
        )
    copies = world_size // ranks
    per_pass = train.micro_batch * copies
    if train.global_batch % per_pass:
        yield (
            "train.global_batch must be divisible by train.micro_batch times the data-parallel size"
            f" = {train.micro_batch} * {copies} = {per_pass}, got {train.global_batch}"
        )
    elif parallel.virtual_pipeline > 1 and train.global_batch // per_pass % parallel.pipeline:
        yield (
            "train.global_batch must give a multiple of parallel.pipeline = "
            f"{parallel.pipeline} micro-batches for the interleaved schedule, "
            f"got {train.global_batch // per_pass} from {train.global_batch}"
        )
