"""The gram_penalty section of a run config: the off-diagonal Gram penalty on the loss."""

from typing import Annotated, Final, Literal

from pydantic import Field

from models.section import ExactInt, Positive, Section
from spectral.gram_penalty import Normalize, Side

SMALL_COEFFICIENT: Final = 1e-3
"""The paper's lambda for 160M parameters, whose width is 768."""

LARGE_COEFFICIENT: Final = 1e-4
"""The paper's lambda for 405M and 1.4B parameters, whose widths are 1024 and 2048."""

LARGE_WIDTH: Final = 1024
"""Least width of a model that takes `LARGE_COEFFICIENT`."""


class GramPenaltyConfig(Section):
    """Off-diagonal Gram penalty on the loss; see docs/spectral.md."""

    roles: Annotated[tuple[str, ...], Field(min_length=1)] = ("v", "o", "down")
    """Roles whose matrices are penalised, each unit on its own."""
    coefficient: Positive | None = None
    """Coefficient of the sum of the penalties, the paper's lambda; null = the paper's choice: 1e-3
    for a model.hidden below 1024, as of its 160M parameters, 1e-4 from there on."""
    horizon: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of the run, from its start, in which the penalty is active; in (0, 1]."""
    power: Annotated[Literal[1, 2], ExactInt] = 2
    """2 penalises the squared Frobenius norm of the off-diagonal part, 1 the norm itself."""
    side: Side = "in"
    """Gram matrix of the columns, W^T W (in), or of the rows, W W^T (out)."""
    normalize: Normalize | None = None
    """Divisor of the squared norm: ||W||_F^4 (frobenius) or n (n - 1) (size); null = 1."""

    def last_step(self, steps: int) -> int:
        """Return the last step of the horizon, counted from 1, in a run of `steps`."""
        return max(1, round(self.horizon * steps))
