"""Muon: momentum, orthogonalised (K. Jordan et al., 2024), and the parts its descendants share."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from spectral import kernels, scaling
from spectral.polar import (
    cache_slices,
    chunk_size,
    msign_,
    polar_of,
    stack_size,
    working_dtype,
)
from spectral.rules.base import (
    DTYPES,
    Report,
    Rule,
    State,
    decay_,
    require,
    require_choice,
    require_fraction,
    require_matrices,
    subtract_,
)
from spectral.schedules import SCHEDULES, coefficients


@dataclass(frozen=True, kw_only=True)
class MuonRule(Rule):
    """Muon on whole matrices; equals torch.optim.Muon on the same coefficients, steps and dtype."""

    whole_matrix: ClassVar[bool] = True
    elementwise_state: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    """Decay of the mean of the gradient, in [0, 1)."""
    nesterov: bool = True
    """Orthogonalise `(1 - momentum) G + momentum M` instead of the mean M itself."""
    schedule: str = "polar_express"
    """Polynomial set of msign, a key of `spectral.schedules.SCHEDULES`."""
    steps: int = 8
    """Steps of msign, at least 1."""
    scale: Literal["spectral_mup", "align_adam_rms", "spectral_kaiming"] = "spectral_mup"
    """How the update depends on the unit's shape; see `spectral.scaling.update_scale`."""
    scale_factor: float = 1.0
    """Multiplies the scale; positive."""
    msign_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the products inside msign; null keeps that of the weight."""

    def __post_init__(self) -> None:
        require_fraction("momentum", self.momentum)
        require_choice("schedule", self.schedule, tuple(SCHEDULES))
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")
        require_choice("scale", self.scale, scaling.MODES)
        require(self.scale_factor > 0, f"scale_factor must be positive, got {self.scale_factor}")
        require_choice("msign_dtype", self.msign_dtype, (None, *DTYPES))

    def init_state(self, weight: Tensor) -> State:
        """The momentum, of the shape of `weight` `[batch, rows, cols]`."""
        require_matrices(weight, type(self).__name__)
        return {"momentum": torch.zeros_like(weight)}

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        *,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        active: Tensor | None,
    ) -> Report:
        """The figures of the rule; see `Rule.update`. Works on slices, which bounds the scratch."""
        size = stack_size(weight.shape[1], weight.shape[2], weight.device)
        reports = []
        for first in range(0, max(1, weight.shape[0]), size):
            part = slice(first, first + size)
            units = {name: value[part] for name, value in state.items()}
            reports.append(
                self.update_units(weight[part], momentum[part], units, lr, weight_decay, active)
            )
        return {name: torch.cat([r[name] for r in reports]) for name in reports[0]}

    def update_units(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        active: Tensor | None,
    ) -> Report:
        """Weight decay and update, on a slice of the batch; what descendants override."""
        return self.descend(weight, momentum, lr, active, weight_decay)

    def descend(
        self,
        weight: Tensor,
        momentum: Tensor,
        lr: float | Tensor,
        active: Tensor | None,
        weight_decay: float | Tensor = 0.0,
    ) -> Report:
        """`update_rms`; decays, then `weight -= lr scale msign(momentum)`, in slices."""
        size = chunk_size(weight.shape[1], weight.shape[2], weight.device)
        polynomials, dtype = (
            coefficients(self.schedule, self.steps),
            working_dtype(momentum, self.dtype),
        )
        reports = [
            self.apply(w, polar_of(m, polynomials, dtype), lr, active, weight_decay)
            for w, m in zip(torch.split(weight, size), torch.split(momentum, size), strict=True)
        ]
        return {name: torch.cat([r[name] for r in reports]) for name in reports[0]}

    def accumulate(self, grad: Tensor, state: State, active: Tensor | None) -> Tensor:
        """The matrix to orthogonalise, in the buffer of `grad`; updates `state["momentum"]`."""
        momentum = state["momentum"]
        for g, m in cache_slices(grad, momentum):
            if active is not None:
                torch.where(active, g, m, out=g)
            torch.lerp(g, m, self.momentum, out=m)
            _ = g.lerp_(m, self.momentum) if self.nesterov else g.copy_(m)
        return grad

    def orthogonalize(self, momentum: Tensor) -> Tensor:
        """`msign(momentum)` in its buffer, with this rule's schedule, steps and dtype."""
        return msign_(momentum, schedule=self.schedule, steps=self.steps, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of msign's products, or None for the weight's."""
        return None if self.msign_dtype is None else DTYPES[self.msign_dtype]

    def update_scale(self, weight: Tensor) -> float:
        """The factor between the orthogonal direction and `lr`."""
        rows, cols = weight.shape[-2:]
        return self.scale_factor * scaling.update_scale((rows, cols), self.scale)

    def apply(
        self,
        weight: Tensor,
        direction: Tensor,
        lr: float | Tensor,
        active: Tensor | None,
        weight_decay: float | Tensor = 0.0,
    ) -> Report:
        """`update_rms` of the scaled direction; decays, then `weight -= lr scale direction`."""
        scale = self.update_scale(weight)
        factor = scale / (weight.shape[-2] * weight.shape[-1]) ** 0.5
        norm = kernels.update_(
            weight, direction, lr=lr, weight_decay=weight_decay, scale=scale, active=active
        )
        if norm is not None:
            return {"update_rms": norm * factor}
        norms = []
        for w, d in cache_slices(weight, direction):
            d = d.to(w.dtype)
            norms.append(torch.linalg.vector_norm(d, dim=(-2, -1)))
            decay_(w, lr, weight_decay, active)
            subtract_(w, d, lr * scale, active)
        return {"update_rms": torch.cat(norms) * factor}
