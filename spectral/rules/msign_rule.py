"""What rules have in common that step along the polar factor of a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..cost import msign_cost
from ..polar import SCHEDULES, Polar, coefficients, normalized_, polars_of
from .accepted_values import require_choice
from .base import Rule, require

DTYPES = {str(d)[6:]: d for d in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, kw_only=True)
class MsignRule(Rule):
    """A whole-matrix rule with the settings of `spectral.msign`."""

    whole_matrix: ClassVar[bool] = True

    schedule: str = "polar_express"
    """Polynomials of msign, a key of `spectral.polar.SCHEDULES`."""
    steps: int = 8
    """Steps of msign, at least 1."""
    msign_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the products inside msign; null keeps that of the weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("schedule", self.schedule, tuple(SCHEDULES))
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of msign's products, None for that of the weight."""
        return None if self.msign_dtype is None else DTYPES[self.msign_dtype]

    def cost(self, shape: Sequence[int]) -> float:
        """Count the FLOPs of one step: elementwise passes, and `matrix_cost` of a matrix."""
        elementwise = super().cost(shape)
        if len(shape) < 2:
            return elementwise
        short, long = sorted(shape)
        return elementwise + self.matrix_cost(short, long)

    def matrix_cost(self, short: int, long: int) -> float:
        """Count the FLOPs of the products of a step on a matrix with sides `short <= long`."""
        return self.msign_cost(short, long)

    def msign_cost(self, short: int, long: int) -> float:
        """Count the FLOPs of one msign of a matrix with sides `short <= long`."""
        dtype = torch.float32 if self.dtype is None else self.dtype
        return msign_cost(short, long, steps=self.steps, dtype=dtype, schedule=self.schedule)

    def polars(self, matrices: Sequence[Tensor]) -> list[Polar]:
        """Return the polar factors of stacks `[batch, rows, cols]`, which are used up."""
        dtype = self.dtype or matrices[0].dtype
        polynomials = coefficients(self.schedule, self.steps, dtype)
        return polars_of([normalized_(x, dtype) for x in matrices], polynomials, dtype)
