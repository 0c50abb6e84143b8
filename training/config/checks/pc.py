"""Checks of PC layers against the rest of the config."""

from collections.abc import Iterator

from models.section import named
from training.config.checks.roles import roles_of
from training.config.schema import Config

NEVER = ("embedding", "head", "gain", "router", "shared_router")
"""Roles that are not linear layers of a block."""


def problems(config: Config) -> Iterator[str]:
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
        if role not in NEVER
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
