"""The section of the run config about the Gram penalty, and what must hold of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from models.preconditioning import BLOCKS
from spectral.gram_penalty import Normalize, Side
from training.check_sentences import at_least, named, positive
from training.config_checks import roles_of

if TYPE_CHECKING:
    from training import config as schema

NEVER = ("embedding", "head", "gain")
"""Roles that are no matrices of a layer."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """When `schedule: adaptive` has the penalty act: while the measured correlation grows."""

    interval: int = 10
    """Steps between measurements."""
    on: float = 0.02
    """Smoothed growth per measurement above which the penalty is switched on."""
    off: float = 0.0
    """Smoothed growth per measurement below which it is switched off; below `on`."""
    smoothing: float = 0.5
    """Share of the old smoothed growth in the new one, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class GramPenaltyConfig:
    """The off-diagonal Gram penalty that is added to the loss; docs/gram_penalty.md."""

    roles: tuple[str, ...] = ("v", "o", "down")
    """Roles whose matrices are penalised, each unit by itself."""
    coefficient: float = 1e-3
    """The paper's lambda: what the sum of the penalties is multiplied by."""
    horizon: float = 0.1
    """Share of the steps, from the first on, in which the penalty may act; in (0, 1]."""
    power: Literal[1, 2] = 2
    """2 penalises the squared Frobenius norm of the off-diagonal part, 1 the norm."""
    side: Side = "in"
    """The Gram matrix of the columns, W^T W (in), or of the rows, W W^T (out)."""
    normalize: Normalize | None = None
    """Divide the squared norm by ||W||_F^4 (frobenius) or n (n - 1) (size), null = by nothing."""
    schedule: Literal["fixed", "adaptive"] = "fixed"
    """fixed acts in every step of the horizon, adaptive as `adaptive` says."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    """When `schedule: adaptive` has the penalty act: while the measured correlation grows."""

    def last_step(self, steps: int) -> int:
        """How many steps of a run of `steps` lie within the horizon, at least one."""
        return max(1, round(self.horizon * steps))


def adaptive(section: AdaptiveConfig) -> Iterator[str]:
    """What is wrong with when the penalty is switched."""
    yield from at_least(section, 1, "interval")
    if not section.off < section.on:
        yield f"off must be below on = {section.on}, got {section.off}"
    if not 0 <= section.smoothing < 1:
        yield f"smoothing must be in [0, 1), got {section.smoothing}"


def gram_penalty(section: GramPenaltyConfig) -> Iterator[str]:
    """What is wrong with the penalty by itself."""
    yield from positive(section, "coefficient")
    if not 0 < section.horizon <= 1:
        yield f"horizon must be in (0, 1], got {section.horizon}"
    if not section.roles:
        yield "roles must name at least one role, got none"


def whole(config: "schema.Config") -> Iterator[str]:
    """What of the penalty does not fit the rest of the config."""
    section = config.gram_penalty
    if section is None:
        return
    optimizer = config.optimizer
    roles = roles_of(config.model, optimizer.qkv_units, optimizer.split_gate_up)
    options = [role for role in roles if role not in NEVER]
    for role in section.roles:
        if role not in options:
            yield f"gram_penalty.roles must name {named(role, options)}"
    if optimizer.distributed.tensor_mode != "home":
        yield (
            "optimizer.distributed.tensor_mode must be home with gram_penalty, "
            f"got {optimizer.distributed.tensor_mode}"
        )
    if config.pc is not None and config.pc.evaluator == "in_graph":
        covered = BLOCKS if config.pc.blocks is None else config.pc.blocks
        both = [role for role in section.roles if role in covered]
        if both:
            yield (
                "pc.evaluator must be materialized where gram_penalty.roles have PC layers, as the "
                f"penalty is on the effective weight, got in_graph with {', '.join(both)}"
            )
