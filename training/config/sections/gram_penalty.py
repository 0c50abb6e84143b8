"""The Gram penalty that is added to the loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from models.section import Section, at_least, ignored, positive
from spectral.gram_penalty import Normalize, Side

BOUNDS: dict[str, tuple[float, float]] = {"gram": (0.02, 0.0), "top_share": (2.0, 1.5)}
"""The default bounds of what is measured, above which the penalty is switched on and below which it
is switched off."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(Section):
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

    def problems(self) -> Iterator[str]:
        """What is wrong with when the penalty is switched."""
        if self.measure != "top_share":
            yield from ignored(self, "samples", "start", when=f"with measure {self.measure}")
        yield from at_least(self, 1, "interval", "start")
        yield from at_least(self, 3, "samples")
        on, off = self.bounds
        if not off < on:
            yield f"off must be below on = {on:g}, got {off:g}"
        if not 0 <= self.smoothing < 1:
            yield f"smoothing must be in [0, 1), got {self.smoothing}"


@dataclass(frozen=True, kw_only=True)
class GramPenaltyConfig(Section):
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

    def problems(self) -> Iterator[str]:
        """What is wrong with the penalty by itself."""
        yield from positive(self, "coefficient")
        if not 0 < self.horizon <= 1:
            yield f"horizon must be in (0, 1], got {self.horizon}"
        if not self.roles:
            yield "roles must name at least one role, got none"
        if self.schedule == "fixed":
            keys = (each.name for each in fields(self.adaptive))
            yield from ignored(self.adaptive, *keys, when="with schedule fixed", prefix="adaptive.")
