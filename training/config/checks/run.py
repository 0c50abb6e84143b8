"""Whether training, optimizer and schedule fit each other."""

from collections.abc import Iterator

from models.section import named
from training.config.checks.roles import roles_of
from training.config.schema import Config


def whole(config: Config) -> Iterator[str]:
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
    yield from _lengths(config)
    yield from _roles(config)
    if config.spikes.rewinds and not config.checkpoint.interval:
        yield f"spikes.rewinds needs checkpoints, got {config.spikes.rewinds} with interval 0"
    if config.optimizer.auto_rule is not None:
        yield from _auto_rule(config)
    yield from _rate_factors(config)


def _auto_rule(config: Config) -> Iterator[str]:
    """Whether the choice of rules is about whole matrices and the weights that the model multiplies
    by, and keeps what it says it keeps."""
    distributed = config.optimizer.distributed
    if distributed.tensor_mode == "shardwise":
        yield (
            "optimizer.distributed.tensor_mode must be owner or duplicated with "
            "optimizer.auto_rule, as nr(G) >= st(A) is of whole matrices, got shardwise"
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


def _rate_factors(config: Config) -> Iterator[str]:
    """Whether there is a factor for each layer, and no product of factors erases weights."""
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
    """Whether the roles with settings of their own are roles of the model."""
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    for role in optimizer.roles:
        if role not in roles:
            yield f"optimizer.roles must name {named(role, roles)}"


def _lengths(config: Config) -> Iterator[str]:
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
