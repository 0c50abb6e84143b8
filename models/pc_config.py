"""The pc section of a run config: the units that are PC layers, and their polynomial.

Source: "PC Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training", section 5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from models.section import AtLeast0, Check, ExactInt, Number, Positive, Section, ignored
from models.units import Unit
from spectral.effective_weight import Preconditioner
from spectral.odd_polynomial import Level, fit_polynomial

BLOCKS = ("o", "gate", "up", "down")
"""The paper's choice: the output of attention and the feed-forward block."""

PresetLevel = Annotated[Literal[0, 1, 2, 3, 4], ExactInt]


class PolynomialConfig(Section):
    """Polynomial of the singular values."""

    kind: Literal["preset", "fitted", "over_flattening"] = "preset"
    """preset: the published polynomial of `level`; fitted: a polynomial fitted with the settings
    below; over_flattening: the paper's ablation, which maps every singular value to 1."""
    degree: Annotated[int, Field(ge=0, le=32)] = 4
    """Number of odd powers after the first, for fitted; 4 ends at x^9."""
    cutoff: Positive = 0.3
    """The fitted polynomial approximates min(x / cutoff, 1)."""
    alpha: AtLeast0 = 4.0
    """Exponent of the weight x^alpha of the squared error in the fit."""
    upper: Number = 1.1
    """End of the interval [0, upper] of the fit."""

    def checks(self) -> Iterator[Check]:
        """Check the interval of the fit."""
        yield "cutoff", self.cutoff >= self.upper, f"must be below upper = {self.upper}"


class PCOverride(Section):
    """Another level for some blocks; if several overrides apply to a block, the last one counts."""

    roles: list[str] | None = None
    """Roles of `blocks` with this level; null = all."""
    layers: tuple[int, int] | None = None
    """First and last layer with this level, counted from 0; null = every layer."""
    level: PresetLevel
    """Level of these blocks."""

    def checks(self) -> Iterator[Check]:
        """Check the order of the layers."""
        first, last = self.layers or (0, 0)
        rule = "must be [first, last] with 0 <= first <= last"
        yield "layers", not 0 <= first <= last, rule


class PCConfig(Section):
    """PC layers: the model multiplies by PC(W) = gamma s g(W / s) instead of W."""

    blocks: list[str] | None = None
    """Roles that are PC layers; null = o, gate, up and down, without roles that the model lacks."""
    level: PresetLevel | None = None
    """Strength of the preset: 4 raises singular values above 0.3 of the largest to the largest, 3
    values above 0.4, 2 above 0.6, 1 above 0.8; 0 changes nothing. null = the paper's choice: 4
    under AdamW, 2 under a spectral rule."""
    overrides: dict[str, PCOverride] = field(default_factory=dict)
    """Other levels for some roles or layers, each under a name of your choice."""
    polynomial: PolynomialConfig = PolynomialConfig()
    """Polynomial of the singular values."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of power iterations that update the tracked spectral norm after each optimizer
    step."""
    spectral_norm: Literal["stream", "none"] = "stream"
    """stream: divide W by its tracked spectral norm s before the polynomial; none: do not divide.
    """
    norm_recovery: bool = True
    """Multiply by s after the polynomial."""
    learnable_gamma: bool = True
    """Train the scalar gamma of every unit."""
    gamma_lr: AtLeast0 | None = None
    """Peak learning rate of gamma; null = the rate of optimizer.scalar."""
    gamma_weight_decay: AtLeast0 | None = None
    """Decoupled weight decay of gamma, towards 0; null = the decay of optimizer.scalar."""
    init_compensation: bool = False
    """Start gamma at the value that gives PC(W) the Frobenius norm of W; false = start at 1."""
    evaluator: Literal["materialized", "in_graph"] = "materialized"
    """materialized: a matrix's owner computes PC(W) once per optimizer step; in_graph: every rank
    computes it in every forward pass. The results are the same."""

    @property
    def roles(self) -> Sequence[str]:
        """Roles that are PC layers where the model has them."""
        return BLOCKS if self.blocks is None else self.blocks

    def covers(self, unit: Unit) -> bool:
        """Return whether `unit` is a PC layer."""
        return unit.role in self.roles

    def preconditioner(self, unit: Unit) -> Preconditioner | None:
        """Return the preconditioner of `unit`, or None if it is no PC layer.

        Raises ValueError if the level is null, which `load_config` replaces by the paper's choice.
        """
        if not self.covers(unit):
            return None
        return Preconditioner(
            level=self._level(unit),
            steps=self.steps,
            norm_recovery=self.norm_recovery,
            spectral_norm=self.spectral_norm,
            init_compensation=self.init_compensation,
        )

    def gamma_decay(self, scalar: float) -> float:
        """Return the weight decay of gamma, given the decay `scalar` of optimizer.scalar."""
        return scalar if self.gamma_weight_decay is None else self.gamma_weight_decay

    def _level(self, unit: Unit) -> Level:
        polynomial = self.polynomial
        if polynomial.kind == "fitted":
            interval = (0.0, polynomial.upper)
            return fit_polynomial(polynomial.degree, polynomial.cutoff, polynomial.alpha, interval)
        if polynomial.kind == "over_flattening":
            return polynomial.kind
        if self.level is None:
            raise ValueError("level must be a number for polynomial.kind preset, got null")
        level = self.level
        for override in self.overrides.values():
            named = override.roles is None or unit.role in override.roles
            layers = override.layers
            if named and (layers is None or unit.layer in range(layers[0], layers[1] + 1)):
                level = override.level
        return level

    def checks(self) -> Iterator[Check]:
        """Check that levels are levels of a preset."""
        kind = self.polynomial.kind
        if kind != "preset":
            rule = f"need polynomial.kind preset, which has levels, got {kind}"
            yield "overrides", self.overrides, rule
            yield from ignored(self, "level", when=f"with polynomial.kind {kind}")
