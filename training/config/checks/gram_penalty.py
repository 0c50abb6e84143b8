"""Checks of the Gram penalty against the rest of the config."""

from collections.abc import Iterator

from models.section import named
from training.config.checks.roles import roles_of
from training.config.schema import Config
from training.config.sections.gram_penalty import GramPenaltyConfig

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
    yield from _noise(config, section)
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


def _noise(config: Config, section: GramPenaltyConfig) -> Iterator[str]:
    """Yield why TopShare, if it switches the penalty, cannot be measured."""
    if section.schedule != "adaptive" or section.adaptive.measure != "top_share":
        return
    if section.roles and all(role.startswith("expert_") for role in section.roles):
        yield (
            "gram_penalty.roles must name a role outside the routed experts with adaptive.measure "
            "top_share, as no rank has the experts' gradients of one micro-batch, "
            f"got {', '.join(section.roles)}"
        )
    train = config.train
    if train.micro_batch >= 1 and train.global_batch // train.micro_batch < 3:
        yield (
            "train.global_batch must be at least 3 micro-batches for gram_penalty.adaptive.measure "
            f"top_share, got {train.global_batch} with micro_batch {train.micro_batch}"
        )
