"""Checks of the Gram penalty against the rest of the config."""

from collections.abc import Iterator

from models.section import named
from training.config.checks.roles import roles_of
from training.config.schema import Config

NEVER = ("embedding", "head", "gain")
"""Roles that are not matrices of a layer."""


def problems(config: Config) -> Iterator[str]:
    """Yield what is wrong between the penalty and other sections."""
    section = config.gram_penalty
    if section is None:
        return
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    options = [role for role in roles if role not in NEVER]
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
