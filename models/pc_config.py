"""The pc section of a run config: the choice of PC layers and their polynomial.

Source: "PC Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training" (arXiv
2606.06470), section 5.
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
"""Roles that are PC layers in the paper: attention output and the feed-forward block."""

PresetLevel = Annotated[Literal[0, 1, 2, 3, 4], ExactInt]


class PolynomialConfig(Section):
    """Polynomial applied to the singular values."""

    kind: Literal["preset", "fitted", "over_flattening"] = "preset"
    """preset: the published polynomial for `level`; fitted: a polynomial fitted with the settings
    below; over_flattening: the paper's ablation, which maps every singular value to 1."""
    degree: Annotated[int, Field(ge=0, le=32)] = 4
    """fitted: number of odd powers above x; with 4, the highest power is x^9."""
    cutoff: Positive = 0.3
    """The fitted polynomial approximates min(x / cutoff, 1)."""
    alpha: AtLeast0 = 4.0
    """Exponent alpha of the weight x^alpha on the squared error of the fit."""
    upper: Number = 1.1
    """Upper end of the interval [0, upper] of singular values for the fit."""

    def checks(self) -> Iterator[Check]:
        """Check the fit interval."""
        yield "cutoff", self.cutoff >= self.upper, f"must be below upper = {self.upper}"


class PCOverride(Section):
    """Overrides the level of some PC layers. The last matching override wins."""

    roles: list[str] | None = None
    """Roles from `blocks` that this override applies to; null = all."""
    layers: tuple[int, int] | None = None
    """First and last layer that this override applies to, counted from 0; null = every layer."""
    level: PresetLevel
    """Level of the matching PC layers."""

    def checks(self) -> Iterator[Check]:
        """Check that `layers`, if set, is a valid range of layer indices."""
        first, last = self.layers or (0, 0)
        rule = "must be [first, last] with 0 <= first <= last"
        yield "layers", not 0 <= first <= last, rule


class PCConfig(Section):
    """PC layers: the model multiplies by PC(W) = gamma s g(W / s) instead of W."""

    blocks: list[str] | None = None
    """Roles whose matrices are preconditioned; null = o, gate, up and down, if they exist."""
    level: PresetLevel | None = None
    """Strength of the preset. With level 4, singular values above 0.3 times the largest become
    about as large as the largest; this threshold is 0.4 for level 3, 0.6 for level 2 and 0.8 for
    level 1. Level 0 is the identity. null = the paper's choice: 4 with AdamW, 2 with a spectral
    rule."""
    overrides: dict[str, PCOverride] = field(default_factory=dict)
    """Level overrides for some roles or layers, keyed by names of your choice."""
    polynomial: PolynomialConfig = PolynomialConfig()
    """Polynomial applied to the singular values."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of block Krylov steps that update the tracked spectral norm after each optimizer
    step."""
    spectral_norm: Literal["stream", "none"] = "stream"
    """stream: divide W by its tracked spectral norm s before the polynomial; none: do not divide.
    """
    norm_recovery: bool = True
    """Multiply by the tracked spectral norm s after the polynomial."""
    learnable_gamma: bool = True
    """Train the scalar gamma of every PC layer."""
    gamma_lr: AtLeast0 | None = None
    """Peak learning rate of gamma; null = the learning rate of optimizer.scalar."""
    gamma_weight_decay: AtLeast0 | None = None
    """Decoupled weight decay of gamma, towards 0; null = the weight decay of optimizer.scalar."""
    init_compensation: bool = False
    """Initialise gamma so that PC(W) and W have the same Frobenius norm; false = initialise gamma
    to 1."""
    evaluator: Literal["materialized", "in_graph"] = "materialized"
    """materialized: each matrix's owner rank computes PC(W) once per optimizer step; in_graph:
    every rank computes PC(W) in every forward pass. Both give the same results."""

    @property
    def roles(self) -> Sequence[str]:
        """Roles whose matrices are preconditioned, if the model has them."""
        return BLOCKS if self.blocks is None else self.blocks

    def covers(self, unit: Unit) -> bool:
        """Return whether `unit` is a PC layer."""
        return unit.role in self.roles

    def preconditioner(self, unit: Unit) -> Preconditioner | None:
        """Return the preconditioner of `unit`, or None if `unit` is not a PC layer."""
        if not self.covers(unit):
            return None
        polynomial, level = self.polynomial, self.level
        chosen: Level
        if polynomial.kind == "fitted":
            interval = (0.0, polynomial.upper)
            chosen = fit_polynomial(
                polynomial.degree, polynomial.cutoff, polynomial.alpha, interval
            )
        elif polynomial.kind == "over_flattening":
            chosen = polynomial.kind
        else:
            assert level is not None  # `load_config` has replaced null
            for override in self.overrides.values():
                named = override.roles is None or unit.role in override.roles
                layers = override.layers
                if named and (layers is None or unit.layer in range(layers[0], layers[1] + 1)):
                    level = override.level
            chosen = level
        return Preconditioner(
            level=chosen,
            steps=self.steps,
            norm_recovery=self.norm_recovery,
            spectral_norm=self.spectral_norm,
            init_compensation=self.init_compensation,
        )

    def gamma_decay(self, scalar: float) -> float:
        """Return the weight decay of gamma. If `gamma_weight_decay` is null, this is `scalar`, the
        weight decay of optimizer.scalar."""
        return scalar if self.gamma_weight_decay is None else self.gamma_weight_decay

    def checks(self) -> Iterator[Check]:
        """Check that levels are set only for preset polynomials."""
        kind = self.polynomial.kind
        if kind != "preset":
            rule = f"must be empty with polynomial.kind {kind}, which has no levels"
            yield "overrides", self.overrides, rule
            yield from ignored(self, "level", when=f"with polynomial.kind {kind}")
