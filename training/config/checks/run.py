"""Checks between training, optimizer, schedule, monitors and model."""

from collections.abc import Iterator

from models.section import ignored, named
from spectral.rules import RULES
from training.config.checks.roles import roles_of
from training.config.schema import Config


def problems(config: Config) -> Iterator[str]:
    """Yield what is wrong between these sections, on any number of ranks."""
    if config.train.fp8 is not None and config.model.attention_backend != "transformer_engine":
        yield (
            "train.fp8 needs model.attention_backend transformer_engine, "
            f"got {config.train.fp8} with {config.model.attention_backend}"
        )
    if config.train.compile is not None and config.model.attention_backend != "sdpa":
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
    if not config.data.validation:
        yield from ignored(
            config.validation,
            "interval",
            "samples",
            "samples_interval",
            when="without sets",
            prefix="validation.",
        )
    if config.data.mock:
        when = "with data.mock, whose tokens are no text"
        yield from ignored(config.validation, "samples_interval", when=when, prefix="validation.")
    optimizer, monitors = config.optimizer, config.monitors
    if not config.model.gated:
        when = f"with model.activation {config.model.activation}, which has no gate"
        yield from ignored(optimizer, "split_gate_up", when=when, prefix="optimizer.")
    if "activations" not in monitors.groups:
        when = "unless monitors.groups has activations"
        yield from ignored(monitors, "activation_gib", when=when, prefix="monitors.")
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    rules = {optimizer.settings_for(role).rule for role in roles}
    if not any(rule in RULES and RULES[rule].elementwise_state for rule in rules):
        yield from ignored(
            optimizer.distributed,
            "momentum_dtype",
            when=f"with rule {' and '.join(sorted(rules))} for all roles",
            prefix="optimizer.distributed.",
        )
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
