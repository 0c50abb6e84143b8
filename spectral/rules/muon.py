"""Muon: momentum, orthogonalised (K. Jordan et al., 2024), and the parts its descendants share."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from spectral import kernels, scaling
from spectral.msign_many import polar_of_stacks
from spectral.polar import (
    Polar,
    cache_slices,
    chunk_size,
    is_tall,
    normalized_,
    polar_,
    stack_size,
    unfinished_polar_of,
    working_dtype,
)
from spectral.rules.base import (
    COPY,
    DTYPES,
    Report,
    Rule,
    Stack,
    State,
    decay_,
    refused,
    require,
    require_choice,
    require_fraction,
    require_matrices,
    subtract_,
    taken,
)
from spectral.schedules import SCHEDULES, coefficients


@dataclass(frozen=True, kw_only=True)
class MuonRule(Rule):
    """Muon on whole matrices; equals torch.optim.Muon on the same coefficients, steps and dtype."""

    whole_matrix: ClassVar[bool] = True
    writes_copy: ClassVar[bool] = True
    joins_shapes: ClassVar[bool] = True
    """True: nothing happens to a stack but momentum, msign and the update; see `step_many`."""
    ends_in_product: ClassVar[bool] = True
    """True: the update may happen in msign's last product, for its length is known before."""
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
        return self.descend(weight, momentum, lr, active, weight_decay, state.get(COPY))

    @torch.no_grad()
    def step_many(
        self,
        stacks: Sequence[Stack],
        *,
        lr: float | Tensor,
        weight_decay: float | Tensor = 0.0,
        active: Tensor | None = None,
    ) -> list[Report]:
        """The reports of `step`; on a device with kernels, stacks that agree in their shorter side
        share the products that do not depend on the longer one."""
        device = kernels.device_name(stacks[0][0].device)
        if not self.joins_shapes or len(stacks) == 1 or not kernels.listed(device):
            return super().step_many(stacks, lr=lr, weight_decay=weight_decay, active=active)
        momenta = [self.accumulate(grad, state, active) for _, grad, state in stacks]
        dtype = working_dtype(momenta[0], self.dtype)
        polynomials = coefficients(self.schedule, self.steps, dtype)
        polars = polar_of_stacks([normalized_(m, dtype) for m in momenta], polynomials, dtype)
        return [
            self.apply(weight, polar, lr, active, weight_decay, state.get(COPY))
            for (weight, _, state), polar in zip(stacks, polars, strict=True)
        ]

    def descend(
        self,
        weight: Tensor,
        momentum: Tensor,
        lr: float | Tensor,
        active: Tensor | None,
        weight_decay: float | Tensor = 0.0,
        copy: Tensor | None = None,
        sound: Tensor | None = None,
    ) -> Report:
        """update_rms and refused; decays, then `weight -= lr scale msign(momentum)`, in slices, and
        `copy` the same. Units that are not `sound` `[batch]` keep their weights."""
        size = chunk_size(weight.shape[1], weight.shape[2], weight.device)
        slices = (torch.split(x, size) for x in (weight, momentum))
        others = (_split(x, size) for x in (copy, sound))
        reports = [
            self.descend_units(w, m, lr, active, weight_decay, c, s)
            for w, m, c, s in zip(*slices, *others, strict=False)
        ]
        return {name: torch.cat([r[name] for r in reports]) for name in reports[0]}

    def descend_units(
        self,
        weight: Tensor,
        momentum: Tensor,
        lr: float | Tensor,
        active: Tensor | None,
        weight_decay: float | Tensor,
        copy: Tensor | None,
        sound: Tensor | None,
    ) -> Report:
        """`descend` on a slice: the update in the last product's epilogue, or a pass of its own."""
        dtype = working_dtype(momentum, self.dtype)
        polynomials = coefficients(self.schedule, self.steps, dtype)
        last, bounded = unfinished_polar_of(momentum, polynomials, dtype)
        if sound is not None:
            bounded = bounded & sound
        if not kernels.finishes(weight, last.y):
            direction = last.finished()
            del last  # before the next pass
            polar = Polar(direction.mT if is_tall(weight) else direction, bounded)
            return self.apply(weight, polar, lr, active, weight_decay, copy)
        norm = kernels.finish_(
            weight,
            *last,
            lr=lr,
            weight_decay=weight_decay,
            scale=self.update_scale(weight),
            active=taken(active, bounded),
            copy=copy,
        )
        return self.size_of(weight, norm, active, bounded)

    def size_of(
        self, weight: Tensor, norm: Tensor, active: Tensor | None, sound: Tensor
    ) -> Report:
        """update_rms, of directions of Frobenius norm `norm` `[batch]`, and refused."""
        rms = torch.where(sound, norm * self.rms_of_norm(weight), 0)
        return {"update_rms": rms, "refused": refused(active, sound)}

    def rms_of_norm(self, weight: Tensor) -> float:
        """What turns a direction's Frobenius norm into the update's root mean square."""
        return self.update_scale(weight) / math.sqrt(weight.shape[-2] * weight.shape[-1])

    def accumulate(self, grad: Tensor, state: State, active: Tensor | None) -> Tensor:
        """The matrix to orthogonalise, in the buffer of `grad`; updates `state["momentum"]`."""
        momentum = state["momentum"]
        for g, m in cache_slices(grad, momentum):
            if active is not None:
                torch.where(active, g, m, out=g)
            torch.lerp(g, m, self.momentum, out=m)
            _ = g.lerp_(m, self.momentum) if self.nesterov else g.copy_(m)
        return grad

    def orthogonalize(self, momentum: Tensor) -> Polar:
        """`msign(momentum)` in its buffer, with this rule's schedule, steps and dtype."""
        return polar_(momentum, schedule=self.schedule, steps=self.steps, dtype=self.dtype)

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
        polar: Polar,
        lr: float | Tensor,
        active: Tensor | None,
        weight_decay: float | Tensor = 0.0,
        copy: Tensor | None = None,
    ) -> Report:
        """update_rms and refused; decays, then `weight -= lr scale direction`, and `copy` the same.

        A unit whose direction did not stay bounded keeps its weight.
        """
        direction, bounded = polar
        scale, gate = self.update_scale(weight), taken(active, bounded)
        norm = kernels.update_(
            weight, direction, lr=lr, weight_decay=weight_decay, scale=scale, active=gate,
            copy=copy,
        )  # fmt: skip
        if norm is not None:
            return self.size_of(weight, norm, active, bounded)
        norms = []
        for w, d, g in cache_slices(weight, direction, gate):
            d = d.to(w.dtype)
            norms.append(torch.linalg.vector_norm(d, dim=(-2, -1)))
            decay_(w, lr, weight_decay, g)
            subtract_(w, d, lr * scale, g)
        if copy is not None:
            copy.copy_(weight)
        return self.size_of(weight, torch.cat(norms), active, bounded)


def _split(x: Tensor | None, size: int) -> Iterable[Tensor | None]:
    """`x` in parts of `size`, or None again and again."""
    return itertools.repeat(None) if x is None else torch.split(x, size)
