"""Checks between the sections of a config; each section checks itself.

Each is a generator of sentences that begin with the key they are about. Start with
`problems_between`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from models.config import MoEConfig
from models.families import FAMILIES
from models.section import named
from training.config.schema import Config

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


def misnamed(key: str, roles: Iterable[str], options: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of `roles`, the value of `key`, that is none of the options."""
    for role in roles:
        if role not in options:
            yield f"{key} must name {named(role, options)}"


def divisible(key: str, size: int, by: str, parts: int, note: str = "") -> Iterator[str]:
    """Yield a line unless `size`, the value of `key`, is a multiple of `parts`, that of `by`."""
    if size % parts:
        yield f"{key} must be divisible by {by} = {parts}{note}, got {size}"


def run_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong between training, optimizer, schedule, checkpoints and model."""
    train, backend = config.train, config.model.attention_backend
    if train.fp8 is not None and backend != "transformer_engine":
        needed = "needs model.attention_backend transformer_engine"
        yield f"train.fp8 {needed}, got {train.fp8} with {backend}"
    if train.compile not in (None, "auto") and backend != "sdpa":
        reason = "as Transformer Engine fuses the same operations"
        yield f"train.compile needs model.attention_backend sdpa, {reason}, got {backend}"
    yield from _lengths(config)
    moe = config.model.moe
    routed_only = moe is not None and not moe.dense_layers and not moe.shared_experts
    if routed_only and train.recompute == "selective":
        yield (
            "train.recompute must be none or full for a model whose feed-forward blocks are all "
            "routed experts, which selective does not recompute, got selective"
        )
    roles = _roles(config)
    yield from misnamed("optimizer.roles", config.optimizer.roles, roles)
    if config.spikes.rewinds and not config.checkpoint.interval:
        reason = "which saves nothing to return to"
        rewinds = config.spikes.rewinds
        yield f"spikes.rewinds must be 0 with checkpoint.interval 0, {reason}, got {rewinds}"


def _roles(config: Config) -> list[str]:
    """The roles of the model's units, in the order of a layer's forward pass."""
    model, optimizer = config.model, config.optimizer
    return FAMILIES[model.family].roles(model, optimizer.qkv_units, optimizer.split_gate_up)


def _lengths(config: Config) -> Iterator[str]:
    """Yield what of the schedule does not fit into the run."""
    validation, length = config.validation, config.train.sequence_length
    room = length - validation.prompt_tokens(length)
    if validation.samples_interval and validation.samples_tokens > room:
        yield (
            f"validation.samples_tokens must be at most {room}, what a sequence of {length} has "
            f"after the prompt, got {validation.samples_tokens}"
        )
    steps, schedule = config.train.steps, config.schedule
    warmup = schedule.warmup_steps
    if warmup >= steps:
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
        reason = "as PC layers would change the effective weights that it loads"
        yield f"checkpoint.initialize_from must be null with pc, {reason}, got {source}"
    options = [role for role in _roles(config) if role not in NOT_LINEAR]
    yield from misnamed("pc.blocks", section.blocks or [], options)
    covered = [role for role in options if role in section.roles]
    for name, override in section.overrides.items():
        for role in override.roles or []:
            key = f"pc.overrides.{name}.roles"
            if role in options and role not in covered:
                yield f"{key} must name PC layers, {named(role, covered)}"
            yield from misnamed(key, [role], options)
        last, layers = (override.layers or (0, 0))[1], config.model.layers
        if last >= layers:
            yield f"pc.overrides.{name}.layers must end below model.layers = {layers}, got {last}"
    backend = config.model.attention_backend
    if section.evaluator == "in_graph" and backend != "sdpa":
        beside = f"with model.attention_backend {backend}"
        yield f"pc.evaluator must be materialized {beside}, got in_graph"
    yield from _owners(config, "PC layers")


def _owners(config: Config, beside: str) -> Iterator[str]:
    mode = config.optimizer.distributed.tensor_mode
    if mode != "owner":
        yield f"optimizer.distributed.tensor_mode must be owner with {beside}, got {mode}"


def _gram_penalty(config: Config) -> Iterator[str]:
    """Yield what is wrong between the penalty and other sections."""
    section = config.gram_penalty
    if section is None:
        return
    options = [role for role in _roles(config) if role not in NOT_IN_A_LAYER]
    yield from misnamed("gram_penalty.roles", section.roles, options)
    yield from _owners(config, "gram_penalty")
    if config.pc is not None and config.pc.evaluator == "in_graph":
        both = ", ".join(role for role in section.roles if role in config.pc.roles)
        if both:
            yield (
                "pc.evaluator must be materialized where gram_penalty.roles have PC layers, as the "
                f"penalty is on the effective weight, got in_graph for {both}"
            )


def _layout(config: Config) -> Iterator[str]:
    """Yield what of the model cannot be split as the layout says."""
    model, parallel = config.model, config.parallel
    tensor, stages = parallel.tensor, parallel.pipeline * parallel.virtual_pipeline
    sizes = {"heads": model.heads, "kv_heads": model.query_groups, "ffn": model.ffn}
    if model.vocab_size is not None:
        sizes["vocab_size, padded to a multiple of model.vocab_multiple,"] = model.padded_vocab
    for key, size in sizes.items():
        yield from divisible(f"model.{key}", size, "parallel.tensor", tensor)
    if parallel.first_stage_layers is not None or parallel.last_stage_layers is not None:
        yield from _uneven_stages(config)
    else:
        by = "parallel.pipeline * parallel.virtual_pipeline"
        yield from divisible("model.layers", model.layers, by, stages)
    if parallel.sequence_parallel:
        length, note = config.train.sequence_length, " under sequence parallelism"
        yield from divisible("train.sequence_length", length, "parallel.tensor", tensor, note)
    yield from _context(config)
    if model.moe is not None:
        yield from _expert_layout(config, model.moe)
        return
    for key, size in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
        if size > 1:
            yield f"parallel.{key} must be 1 for model.family {config.model.family}, got {size}"


def _uneven_stages(config: Config) -> Iterator[str]:
    """Yield why the layers cannot be divided over stages of given sizes and the others."""
    parallel, layers = config.parallel, config.model.layers
    keys = ("first_stage_layers", "last_stage_layers")
    given = {key: size for key in keys if (size := getattr(parallel, key)) is not None}
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
    experts, width, tensor = parallel.expert, moe.expert_ffn, parallel.tensor
    yield from divisible("model.moe.experts", moe.experts, "parallel.expert", experts)
    by = "parallel.expert_tensor"
    yield from divisible("model.moe.expert_ffn", width, by, parallel.expert_tensor)
    key = "model.moe.shared_experts * model.moe.expert_ffn"
    yield from divisible(key, moe.shared_experts * width, "parallel.tensor", tensor)
    if tensor > 1 and not parallel.sequence_parallel:
        beside = f"for model.family {config.model.family} with tensor > 1"
        yield f"parallel.sequence must be true or null {beside}, got false"


def world(config: Config, world_size: int) -> Iterator[str]:
    """Yield what is wrong on `world_size` ranks, and what would be right nearby."""
    problems = list(_world_problems(config, world_size))
    nearby = f"; {_nearby(config, world_size)}" if problems else ""
    yield from (problem + nearby for problem in problems)


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
    return [size for size in options if _legal(config, world_size, micro_batch=size)]


def _legal(config: Config, world_size: int, **train: int) -> bool:
    """Whether `config` with other values under `train` can run on `world_size` ranks."""
    changed = replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]
    return not any(_world_problems(changed, world_size))


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
        found["train.global_batch"] = [
            batch
            for batch in (below, below + unit)
            if batch and _legal(config, world_size, global_batch=batch)
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
    if world_size % ranks:
        yield (
            f"the number of ranks must be divisible by parallel.tensor * pipeline * context = "
            f"{parallel.tensor} * {parallel.pipeline} * {parallel.context} = {ranks}, "
            f"got {world_size}"
        )
        return
    yield from divisible(
        "the number of ranks of a pipeline stage",
        world_size // parallel.pipeline,
        f"parallel.expert * expert_tensor = {parallel.expert} * {parallel.expert_tensor}",
        parallel.expert * parallel.expert_tensor,
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
