"""The gram_penalty section of a run config: the off-diagonal Gram penalty on the loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from models.section import Section, at_least, ignored, positive
from spectral.gram_penalty import Normalize, Side

BOUNDS: dict[str, tuple[float, float]] = {"gram": (0.02, 0.0), "top_share": (2.0, 1.5)}
"""By measure, the default level above which the penalty is switched on, and below which off."""

SMALL_COEFFICIENT: Final = 1e-3
"""The paper's lambda for 160M parameters, whose width is 768."""

LARGE_COEFFICIENT: Final = 1e-4
"""The paper's lambda for 405M and 1.4B parameters, whose widths are 1024 and 2048."""

LARGE_WIDTH: Final = 1024
"""Least width of a model that takes `LARGE_COEFFICIENT`."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(Section):
    """When the penalty is active under `schedule: adaptive`: while a measurement is high."""

    measure: Literal["gram", "top_share"] = "gram"
    """What is measured: gram, the growth of the off-diagonal energy per measurement, or top_share,
    the concentration of gradient noise relative to the start of the run."""
    interval: int = 10
    """Steps between measurements."""
    on_above: float | None = None
    """Smoothed measurement above which the penalty is switched on; null = 0.02 (gram) or 2
    (top_share)."""
    off_below: float | None = None
    """Smoothed measurement, less than `on_above`, below which it is switched off; null = 0 (gram)
    or 1.5 (top_share)."""
    smoothing: float = 0.5
    """Decay of the exponential mean of measurements, in [0, 1)."""
    samples: int = 8
    """Number of micro-batches, the first of a step, per measurement of top_share; at least 3."""
    start: int = 3
    """Number of measurements of top_share, the first ones, whose mean is the baseline; until then
    the penalty is off."""

    @property
    def bounds(self) -> tuple[float, float]:
        """`on_above` and `off_below` with their defaults resolved."""
        on, off = BOUNDS[self.measure]
        return (
            on if self.on_above is None else self.on_above,
            off if self.off_below is None else self.off_below,
        )

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the adaptive schedule."""
        if self.measure != "top_share":
            yield from ignored(self, "samples", "start", when=f"with measure {self.measure}")
        yield from at_least(self, 1, "interval", "start")
        yield from at_least(self, 3, "samples")
        on, off = self.bounds
        if not off < on:
            yield f"off_below must be less than on_above = {on:g}, got {off:g}"
        if not 0 <= self.smoothing < 1:
            yield f"smoothing must be in [0, 1), got {self.smoothing}"


@dataclass(frozen=True, kw_only=True)
class GramPenaltyConfig(Section):
    """Off-diagonal Gram penalty on the loss; see docs/gram_penalty.md."""

    roles: tuple[str, ...] = ("v", "o", "down")
    """Roles whose matrices are penalised, each unit on its own."""
    coefficient: float | None = None
    """Coefficient of the sum of the penalties, the paper's lambda; null = the paper's choice: 1e-3
    for a model.hidden below 1024, as of its 160M parameters, 1e-4 from there on."""
    horizon: float = 0.1
    """Fraction of the run, from its start, in which the penalty may be active; in (0, 1]."""
    power: Literal[1, 2] = 2
    """2 penalises the squared Frobenius norm of the off-diagonal part, 1 the norm itself."""
    side: Side = "in"
    """Gram matrix of the columns, W^T W (in), or of the rows, W W^T (out)."""
    normalize: Normalize | None = None
    """Divisor of the squared norm: ||W||_F^4 (frobenius) or n (n - 1) (size); null = 1."""
    schedule: Literal["fixed", "adaptive"] = "fixed"
    """fixed is active throughout the horizon, adaptive as the section `adaptive` says."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    """When the penalty is active under `schedule: adaptive`: while a measurement is high."""

    @property
    def resolved_coefficient(self) -> float:
        """The coefficient. Raises ValueError if it is null: `load_config` puts the paper's choice
        there."""
        if self.coefficient is None:
            raise ValueError("coefficient must be a number, got null")
        return self.coefficient

    def last_step(self, steps: int) -> int:
        """Return the last step of the horizon, counted from 1, in a run of `steps`."""
        return max(1, round(self.horizon * steps))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the penalty."""
        yield from positive(self, "coefficient")
        if not 0 < self.horizon <= 1:
            yield f"horizon must be in (0, 1], got {self.horizon}"
        if not self.roles:
            yield "roles must name at least one role, got none"
        if self.schedule == "fixed":
            keys = (each.name for each in fields(self.adaptive))
            yield from ignored(self.adaptive, *keys, when="with schedule fixed", prefix="adaptive.")
