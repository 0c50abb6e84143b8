"""What rules have in common that step along the polar factor of a matrix."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..cost import Product, msign_cost
from ..schedules import SCHEDULES
from .base import Rule, require, require_choice

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class MsignRule(Rule):
    """A whole-matrix rule with the settings of `spectral.msign`."""

    whole_matrix: ClassVar[bool] = True

    schedule: str = "polar_express"
    """Polynomial set of msign, a key of `spectral.schedules.SCHEDULES`."""
    steps: int = 8
    """Steps of msign, at least 1."""
    msign_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the products inside msign; null keeps that of the weight."""

    def __post_init__(self) -> None:
        require_choice("schedule", self.schedule, tuple(SCHEDULES))
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")
        require_choice("msign_dtype", self.msign_dtype, (None, *DTYPES))

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of msign's products, None for that of the weight."""
        return None if self.msign_dtype is None else DTYPES[self.msign_dtype]

    def matrix_cost(self, short: int, long: int, product: Product) -> float:
        """Count the FLOPs of one msign; see `Rule.matrix_cost`."""
        return self.msign_cost(short, long, product)

    def msign_cost(self, short: int, long: int, product: Product) -> float:
        """Count the FLOPs of one msign of a matrix with sides `short <= long`."""
        dtype = torch.float32 if self.dtype is None else self.dtype
        return msign_cost(
            short, long, steps=self.steps, dtype=dtype, schedule=self.schedule, product=product
        )
