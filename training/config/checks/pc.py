"""Whether PC layers fit the rest of the config."""

from collections.abc import Iterator

from models.section import named
from training.config.checks.roles import roles_of
from training.config.schema import Config

NEVER = ("embedding", "head", "gain", "router", "shared_router")
"""Roles that are no linear layers of a block."""


def whole(config: Config) -> Iterator[str]:
    """What of PC layers does not fit the rest of the config."""
    section = config.pc
    if section is None:
        return
    source = config.checkpoint.initialize_from
    if source is not None:
        yield (
            "checkpoint.initialize_from must be null with pc: it gives the weights that a model "
            f"multiplies by, and PC layers would change them, got {source}"
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
    for name, each in section.overrides.items():
        for role in each.roles or []:
            if role not in options:
                yield f"pc.overrides.{name}.roles must name {named(role, options)}"
        if each.layers is not None and each.layers[1] >= config.model.layers:
            yield (
                f"pc.overrides.{name}.layers must end below model.layers = "
                f"{config.model.layers}, got {each.layers[1]}"
            )
    if section.evaluator == "in_graph" and config.model.attention_backend != "sdpa":
        yield (
            "pc.evaluator in_graph needs model.attention_backend sdpa, got "
            f"{config.model.attention_backend}; materialized works with any"
        )
    if optimizer.distributed.tensor_mode != "owner":
        yield (
            "optimizer.distributed.tensor_mode must be owner with PC layers, "
            f"got {optimizer.distributed.tensor_mode}"
        )
