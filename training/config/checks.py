"""Checks between the sections of a config; each section checks itself.

Start with `BETWEEN`, which lists those that hold on any number of ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Final

from models.families import FAMILIES, family_checks
from models.section import Check, named, problems
from training.config.schema import Config, ParallelConfig

NOT_LINEAR: Final = ("embedding", "head", "gain", "bias", "router", "shared_router")
"""Roles that are not linear layers of a block."""

NOT_IN_A_LAYER: Final = ("embedding", "head", "gain", "bias")
"""Roles that are not matrices of a layer."""


def misnamed(key: str, roles: Iterable[str], options: Sequence[str]) -> Iterator[Check]:
    """Check that each of `roles`, the value of `key`, is one of the options."""
    for role in roles:
        yield key, role not in options, f"must name {named(role, options)}"


def divisible(key: str, size: int, parallel: ParallelConfig, *axes: str) -> Check:
    """Check that `size`, the value of `key`, is a multiple of the product of axes."""
    sizes = [getattr(parallel, axis) for axis in axes]
    product = " * ".join(axes), " * ".join(map(str, sizes)), str(prod(sizes))
    by = " = ".join(dict.fromkeys(product))
    return key, size % prod(sizes), f"must be divisible by parallel.{by}, got {size}"


def model_checks(config: Config) -> Iterator[Check]:
    """Check that the model belongs to its family."""
    for key, wrong, rule in family_checks(config.model):
        yield f"model.{key}", wrong, rule


def run_checks(config: Config) -> Iterator[Check]:
    """Check training, optimizer and checkpoints against the model."""
    train, moe = config.train, config.model.moe
    plain = config.model.attention_backend == "sdpa"
    engine = "needs model.attention_backend transformer_engine"
    yield "train.fp8", train.fp8 is not None and plain, engine
    compiled = not plain and train.compile not in (None, "auto")
    sdpa = "needs model.attention_backend sdpa, as Transformer Engine fuses the same operations"
    yield "train.compile", compiled, sdpa
    wide = config.model.attention_kernel != "auto" and train.precision != "bf16"
    yield "model.attention_kernel", wide, "needs train.precision bf16"
    kernels = not plain and train.fused_backward == "triton"
    own = "must be auto or null with model.attention_backend transformer_engine, which has its own"
    yield "train.fused_backward", kernels, own
    kept = "needs model.attention_backend sdpa, as Transformer Engine gets no borders here"
    yield "data.document_mask", config.data.document_mask and not plain, kept
    packaged = config.data.document_mask and config.model.attention_kernel != "auto"
    yield "data.document_mask", packaged, "needs model.attention_kernel auto"
    routed_only = moe is not None and not moe.dense_layers and not moe.shared_experts
    dense = "must be none or full where all blocks are routed experts, which selective keeps"
    yield "train.recompute", routed_only and train.recompute == "selective", dense
    yield from misnamed("optimizer.roles", config.optimizer.roles, _roles(config))
    unsaved = config.spikes.rewinds and not config.checkpoint.interval
    saved = "must be 0 with checkpoint.interval 0, which saves nothing to return to"
    yield "spikes.rewinds", unsaved, saved
    profile = config.log.profile
    if profile is not None:
        after = f"must be at most train.steps = {train.steps}"
        yield "log.profile.first", profile.first > train.steps, after


def _roles(config: Config) -> list[str]:
    """The roles of the model's units, in the order of a layer's forward pass."""
    model, optimizer = config.model, config.optimizer
    return FAMILIES[model.family].roles(model, optimizer.qkv_units, optimizer.split_gate_up)


def length_checks(config: Config) -> Iterator[Check]:
    """Check that samples and schedule fit into the run."""
    steps, length = config.train.steps, config.train.sequence_length
    warmup, schedule = config.schedule.warmup_steps, config.schedule
    whole = schedule.length(config.train)
    unit = f"train.steps = {steps}" if whole == steps else f"the run's {whole:g} full steps"
    rule = f"must be below {unit}, got {warmup}"
    help_ = f"schedule.warmup_steps={steps // 10}, or a longer train.steps with exit_step={steps}"
    yield "schedule.warmup_steps", warmup >= whole, f"{rule}; override {help_}"
    decaying = schedule.cooldown_steps(whole) if schedule.kind == "wsd" else 0
    apart = f"of {whole:g} steps must not overlap schedule.warmup_steps = {warmup}"
    yield "schedule.cooldown_fraction", warmup < whole < warmup + decaying, apart
    validation = config.validation
    room = length - validation.prompt_tokens(length)
    long = validation.samples_interval and validation.samples_tokens > room
    fitting = f"must be at most {room}, what a sequence of {length} has after the prompt"
    yield "validation.samples_tokens", long, fitting


def phase_checks(config: Config) -> Iterator[Check]:
    """Check that the phases of the data follow each other within the run."""
    before, steps, kind = 0, config.train.steps, config.schedule.kind
    for i, (phase, start) in enumerate(zip(config.data.phases, config.phase_starts(), strict=True)):
        key = f"data.phases[{i}].{phase.beginning}"
        rule = f"needs schedule.kind wsd, got {kind}"
        yield key, phase.with_decay and kind != "wsd", rule
        rule = f"must begin after step {before:,}, where the part before it begins, and before the"
        late = not before < start < steps
        yield key, late, f"{rule} last of train.steps = {steps:,}, got a start after {start:,}"
        before = start


def pc_checks(config: Config) -> Iterator[Check]:
    """Check PC layers against other sections."""
    pc, model = config.pc, config.model
    if pc is None:
        return
    null = "must be null with pc, as PC layers would change the effective weights that it loads"
    yield "checkpoint.initialize_from", config.checkpoint.initialize_from is not None, null
    options = [role for role in _roles(config) if role not in NOT_LINEAR]
    yield from misnamed("pc.blocks", pc.blocks or [], options)
    covered = [role for role in options if role in pc.roles]
    for name, override in pc.overrides.items():
        yield from misnamed(f"pc.overrides.{name}.roles", override.roles or [], covered)
        last = (override.layers or (0, 0))[1]
        below = f"must end below model.layers = {model.layers}, got {last}"
        yield f"pc.overrides.{name}.layers", last >= model.layers, below
    fused = pc.evaluator == "in_graph" and model.attention_backend != "sdpa"
    beside = f"must be materialized with model.attention_backend {model.attention_backend}"
    yield "pc.evaluator", fused, beside
    yield _owners(config, "PC layers")


def _owners(config: Config, beside: str) -> Check:
    """Check that matrices are whole at their owners."""
    key = "optimizer.distributed.tensor_mode"
    return key, config.optimizer.distributed.tensor_mode != "owner", f"must be owner with {beside}"


def penalty_checks(config: Config) -> Iterator[Check]:
    """Check the penalty against other sections."""
    section, pc = config.gram_penalty, config.pc
    if section is None:
        return
    options = [role for role in _roles(config) if role not in NOT_IN_A_LAYER]
    yield from misnamed("gram_penalty.roles", section.roles, options)
    yield _owners(config, "gram_penalty")
    in_graph = pc.roles if pc is not None and pc.evaluator == "in_graph" else ()
    both = ", ".join(role for role in section.roles if role in in_graph)
    rule = f"must be materialized for PC layers of gram_penalty.roles, got in_graph for {both}"
    yield "pc.evaluator", both, rule


def layout_checks(config: Config) -> Iterator[Check]:
    """Check that the model can be split as the layout says."""
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
    rule = f"must be divisible by {pieces} for {axes}"
    yield "train.sequence_length", length % pieces, rule
    if moe is None:
        for key in ("expert", "expert_tensor"):
            dense = f"must be 1 for model.family {model.family}"
            yield f"parallel.{key}", getattr(parallel, key) > 1, dense
        return
    yield divisible("model.moe.experts", moe.experts, parallel, "expert")
    yield divisible("model.moe.expert_ffn", moe.expert_ffn, parallel, "expert_tensor")
    key = "model.moe.shared_experts * model.moe.expert_ffn"
    yield divisible(key, moe.shared_experts * moe.expert_ffn, parallel, "tensor")
    uncut = tensor > 1 and not parallel.sequence_parallel
    beside = f"must be true or null for model.family {model.family} with tensor > 1"
    yield "parallel.sequence", uncut, beside


def _stages(config: Config) -> Check:
    """Check that the layers can be divided over stages of given sizes and the others."""
    parallel, layers = config.parallel, config.model.layers
    keys = ("first_stage_layers", "last_stage_layers")
    given = {key: size for key in keys if (size := getattr(parallel, key)) is not None}
    if not given or parallel.pipeline == 1:
        return divisible("model.layers", layers, parallel, "pipeline", "virtual_pipeline")
    others, rest = parallel.pipeline - len(given), layers - sum(given.values())
    if not others:
        return "model.layers", rest, f"must be parallel.{' + '.join(keys)} = {layers - rest}"
    fixed = " and ".join(f"parallel.{key} = {size}" for key, size in given.items())
    equal = f"must leave the other {others} stages equally many layers, at least one, beside"
    return "model.layers", rest < others or rest % others, f"{equal} {fixed}"


BETWEEN = (
    model_checks, run_checks, length_checks, phase_checks, layout_checks, pc_checks, penalty_checks,
)  # fmt: skip
"""What must hold between the sections, on any number of ranks."""


def world(config: Config, world_size: int, step: int = 0, tokens: int = 0) -> Iterator[str]:
    """Yield what is wrong on `world_size` ranks, and what would be right nearby; see
    `world_checks`."""
    lines = list(problems(config, world_checks(config, world_size, step, tokens)))
    nearby = f"; {_nearby(config, world_size)}" if lines else ""
    yield from (line + nearby for line in lines)


def fits(config: Config, world_size: int, **train: int) -> bool:
    """Return whether `config`, with other values under `train`, can run on `world_size` ranks."""
    changed = replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]
    return holds(world_checks(changed, world_size))


def holds(checks: Iterable[Check]) -> bool:
    """Return whether nothing is wrong."""
    return not any(wrong for _, wrong, _ in checks)


def legal_ranks(config: Config) -> list[int]:
    """Return the numbers of ranks that `config` can run on, ascending."""
    train, ranks = config.train, config.parallel.model_ranks
    copies = divisors(train.global_batch // train.micro_batch)
    return [ranks * each for each in copies if fits(config, ranks * each)]


def legal_micro_batches(config: Config, world_size: int) -> list[int]:
    """Return the micro-batches with which `config` can run on `world_size` ranks, ascending."""
    options = divisors(config.train.global_batch)
    return [size for size in options if fits(config, world_size, micro_batch=size)]


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _nearby(config: Config, world_size: int) -> str:
    """Name the legal numbers of ranks and the legal batches that are nearest."""
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
    return f"legal nearby: {'; '.join(shown)}" if shown else "no number nearby is legal"


def _nearest(legal: list[int], wanted: int) -> list[int]:
    """Return the last of ascending numbers up to `wanted` and the first from there on."""
    below = [each for each in legal if each <= wanted][-1:]
    above = [each for each in legal if each >= wanted][:1]
    return sorted({*below, *above})


def world_checks(
    config: Config, world_size: int, step: int = 0, tokens: int = 0
) -> Iterator[Check]:
    """Check layout and batches on `world_size` ranks, of a ramp those of the stages that are left
    after `step` steps and `tokens` tokens."""
    parallel, train, ranks = config.parallel, config.train, config.parallel.model_ranks
    profile = config.log.profile
    if profile is not None:
        below = f"must be below the number of ranks = {world_size}"
        yield "log.profile.ranks", max(profile.ranks) >= world_size, below
    yield divisible("the number of ranks", world_size, parallel, "tensor", "pipeline", "context")
    if world_size % ranks:
        return
    stage, of_stage = "the number of ranks of a pipeline stage", world_size // parallel.pipeline
    yield divisible(stage, of_stage, parallel, "expert", "expert_tensor")
    copies = world_size // ranks
    per_pass = train.micro_batch * copies
    by = f"train.micro_batch times the data-parallel size = {train.micro_batch} * {copies}"
    whole = f"must give a multiple of parallel.pipeline = {parallel.pipeline} micro-batches for"
    stages = {
        stage.batch: f"train.batch_ramp[{i}].batch" for i, stage in enumerate(train.batch_ramp)
    }
    left = [part.batch for part in train.equal_steps(step, tokens)]
    for batch in dict.fromkeys([*left, train.global_batch]):
        key = stages.get(batch, "train.global_batch")
        rule = f"must be divisible by {by} = {per_pass}, got {batch}"
        yield key, batch % per_pass, rule
        uneven = parallel.virtual_pipeline > 1 and batch % per_pass == 0
        got = f"{batch // per_pass} from {batch}"
        rule = f"{whole} the interleaved schedule, got {got}"
        yield key, uneven and batch // per_pass % parallel.pipeline, rule
