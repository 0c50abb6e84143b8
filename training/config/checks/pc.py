"""What must hold of the pc section of a run config."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from models.pc_config import PCConfig, PCOverride, PolynomialConfig
from training.config.checks.sentences import at_least, named, positive
from training.config.checks.sections import roles_of

if TYPE_CHECKING:
    from training.config.schema import schema as schema

NEVER = ("embedding", "head", "gain", "router", "shared_router")
"""Roles that are no linear layers of a block."""


def polynomial(section: PolynomialConfig) -> Iterator[str]:
    """What is wrong with a fitted polynomial."""
    yield from at_least(section, 0, "degree", "alpha")
    yield from positive(section, "cutoff")
    if not section.cutoff < section.upper:
        yield f"cutoff must be below upper = {section.upper}, got {section.cutoff}"


def override(section: PCOverride) -> Iterator[str]:
    """What is wrong with the layers of an override."""
    if section.layers is not None and not 0 <= section.layers[0] <= section.layers[1]:
        yield f"layers must be [first, last] with 0 <= first <= last, got {list(section.layers)}"


def pc(section: PCConfig) -> Iterator[str]:
    """What is wrong with PC layers by themselves."""
    yield from at_least(section, 1, "steps")
    yield from at_least(section, 0, "gamma_lr", "gamma_weight_decay")
    if section.overrides and section.polynomial.kind != "preset":
        kind = section.polynomial.kind
        yield f"overrides need polynomial.kind preset, which has levels, got {kind}"
    if not section.learnable_gamma and section.gamma_lr is not None:
        yield f"gamma_lr must be null without learnable_gamma, got {section.gamma_lr}"


def whole(config: "schema.Config") -> Iterator[str]:
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
    if optimizer.distributed.tensor_mode != "home":
        yield (
            "optimizer.distributed.tensor_mode must be home with PC layers, "
            f"got {optimizer.distributed.tensor_mode}"
        )
