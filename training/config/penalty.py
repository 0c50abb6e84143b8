"""The section of the run config about the Gram penalty, and what must hold of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from models.pc_config import BLOCKS
from spectral.gram_penalty import Normalize, Side
from training.config.checks.sentences import at_least, named, positive
from training.config.checks.sections import roles_of

if TYPE_CHECKING:
    from training.config.schema import schema as schema

NEVER = ("embedding", "head", "gain")
"""Roles that are no matrices of a layer."""


BOUNDS: dict[str, tuple[float, float]] = {"gram": (0.02, 0.0), "top_share": (2.0, 1.5)}
"""The default bounds of what is measured, above which the penalty is switched on and below which it
is switched off."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """When `schedule: adaptive` has the penalty act: while what is measured is high."""

    measure: Literal["gram", "top_share"] = "gram"
    """gram is the growth per measurement of the off-diagonal energy, top_share how concentrated the
    gradients' noise is, over what it was at the start."""
    interval: int = 10
    """Steps between measurements."""
    on: float | None = None
    """Smoothed measure above which the penalty is switched on; null = 0.02 (gram), 2
    (top_share)."""
    off: float | None = None
    """Smoothed measure below which it is switched off, below `on`; null = 0 (gram), 1.5
    (top_share)."""
    smoothing: float = 0.5
    """Share of the old smoothed measure in the new one, in [0, 1)."""
    samples: int = 8
    """Micro-batches of a step, its first ones, whose gradients give one top_share; at least 3."""
    start: int = 3
    """Measurements of top_share whose mean is the start; before them the penalty is off."""

    @property
    def bounds(self) -> tuple[float, float]:
        """`on` and `off`, the defaults filled in."""
        on, off = BOUNDS[self.measure]
        return (on if self.on is None else self.on, off if self.off is None else self.off)


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
    """When `schedule: adaptive` has the penalty act: while what is measured is high."""

    def last_step(self, steps: int) -> int:
        """How many steps of a run of `steps` lie within the horizon, at least one."""
        return max(1, round(self.horizon * steps))


def adaptive(section: AdaptiveConfig) -> Iterator[str]:
    """What is wrong with when the penalty is switched."""
    yield from at_least(section, 1, "interval", "start")
    yield from at_least(section, 3, "samples")
    on, off = section.bounds
    if not off < on:
        yield f"off must be below on = {on:g}, got {off:g}"
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
    yield from _noise(config, section)
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


def _noise(config: "schema.Config", section: GramPenaltyConfig) -> Iterator[str]:
    """Whether there is what TopShare is measured of, if it is to switch the penalty."""
    if section.schedule != "adaptive" or section.adaptive.measure != "top_share":
        return
    if section.roles and all(role.startswith("expert_") for role in section.roles):
        yield (
            "gram_penalty.roles must name a role that is not of routed experts with "
            "adaptive.measure top_share, as their micro-batches' gradients are not told apart, "
            f"got {', '.join(section.roles)}"
        )
    train = config.train
    if train.micro_batch >= 1 and train.global_batch // train.micro_batch < 3:
        yield (
            "train.global_batch must be at least 3 micro-batches for gram_penalty.adaptive.measure "
            f"top_share, got {train.global_batch} of micro_batch {train.micro_batch}"
        )
