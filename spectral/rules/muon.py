"""Muon: orthogonalised momentum (K. Jordan et al., 2024), and the parts its subclasses share."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels, scaling
from ..joined_stacks import apart, numbers, together
from ..msign_many import polar_of_stacks
from ..polar import (
    Polar,
    cache_slices,
    chunk_size,
    normalized_,
    polar_,
    polar_of,
    stack_size,
    working_dtype,
)
from ..schedules import coefficients
from .base import (
    COPY,
    Rate,
    Report,
    Stack,
    State,
    decay_,
    rate_of_stacks,
    refused,
    require,
    require_choice,
    require_fraction,
    require_matrices,
    subtract_,
    taken,
    units_of,
    unless_all,
)
from .msign_rule import MsignRule


@dataclass(frozen=True, kw_only=True)
class MuonRule(MsignRule):
    """Muon on whole matrices; equals `torch.optim.Muon` on the same coefficients and dtype."""

    writes_copy: ClassVar[bool] = True
    reads_weight: ClassVar[bool] = False
    joins_shapes: ClassVar[bool] = True  # a step is momentum, msign and the update alone
    elementwise_state: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    """Decay of the mean of the gradient, in [0, 1)."""
    nesterov: bool = True
    """Orthogonalise `(1 - momentum) G + momentum M` instead of the mean M itself."""
    scale: Literal["spectral_mup", "align_adam_rms", "spectral_kaiming"] = "spectral_mup"
    """How the update depends on the unit's shape; see `spectral.scaling.update_scale`."""
    scale_factor: float = 1.0
    """Factor of the scale; positive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("momentum", self.momentum)
        require_choice("scale", self.scale, scaling.MODES)
        require(self.scale_factor > 0, f"scale_factor must be positive, got {self.scale_factor}")

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum, of the shape of `weight` `[batch, rows, cols]`."""
        require_matrices(weight, type(self).__name__)
        return {"momentum": torch.zeros_like(weight)}

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        *,
        lr: Rate,
        weight_decay: Rate,
        active: Tensor | None,
    ) -> Report:
        """Update slice by slice, which bounds the scratch; see `Rule.update`."""
        size = stack_size(weight.shape[1], weight.shape[2], weight.device)
        reports = []
        for first in range(0, max(1, weight.shape[0]), size):
            part = slice(first, first + size)
            units = {name: value[part] for name, value in state.items()}
            rates = units_of(lr, part), units_of(weight_decay, part)
            reports.append(self.update_units(weight[part], momentum[part], units, *rates, active))
        return joined(reports)

    def update_units(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        lr: Rate,
        weight_decay: Rate,
        active: Tensor | None,
    ) -> Report:
        """Decay and update a slice of the batch; what subclasses override."""
        return self.descend(weight, momentum, lr, active, weight_decay, state.get(COPY))

    @torch.no_grad()
    def step_many(
        self, stacks: Sequence[Stack], *, weight_decay: Rate = 0.0, active: Tensor | None = None
    ) -> list[Report]:
        """Step stacks of different shapes; see `Rule.step_many`.

        On a device with kernels, stacks with equal shorter sides share the work that does not
        depend on the longer side.
        """
        if not self._joins(stacks):
            return super().step_many(stacks, weight_decay=weight_decay, active=active)
        momenta = [
            stack._replace(grad=self.accumulate(stack.grad, stack.state, active))
            for stack in stacks
        ]
        return self.update_many(momenta, weight_decay=weight_decay, active=active)

    @torch.no_grad()
    def update_many(
        self, stacks: Sequence[Stack], *, weight_decay: Rate = 0.0, active: Tensor | None = None
    ) -> list[Report]:
        """Update stacks of different shapes, those with equal shorter sides together; see
        `Rule.update_many`."""
        if not self._joins(stacks):
            return super().update_many(stacks, weight_decay=weight_decay, active=active)
        by_side: dict[int, list[int]] = {}
        for i, stack in enumerate(stacks):
            by_side.setdefault(min(matrix_shape(stack.weight)), []).append(i)
        found: dict[int, Report] = {}
        for indices in by_side.values():
            some = [stacks[i] for i in indices]
            reports = self.update_joined(some, weight_decay, active)
            found.update(zip(indices, reports, strict=True))
        return [found[i] for i in range(len(stacks))]

    def update_joined(
        self, stacks: Sequence[Stack], weight_decay: Rate, active: Tensor | None
    ) -> list[Report]:
        """Decay and update stacks with equal shorter sides on a device with kernels.

        What subclasses that join shapes override, beside `update_units`.
        """
        return self.apply_many(stacks, self.polars(stacks), active, weight_decay)

    def _joins(self, stacks: Sequence[Stack]) -> bool:
        """Return whether stacks are updated together: several, on a device with kernels."""
        name = kernels.device_name(stacks[0].weight.device)
        return self.joins_shapes and len(stacks) > 1 and kernels.listed(name)

    def polars(self, stacks: Sequence[Stack]) -> list[Polar]:
        """Compute the polar factors of the momenta, which are overwritten."""
        dtype = working_dtype(stacks[0].grad, self.dtype)
        polynomials = coefficients(self.schedule, self.steps, dtype)
        momenta = [normalized_(stack.grad, dtype) for stack in stacks]
        return polar_of_stacks(momenta, polynomials, dtype)

    def descend(
        self,
        weight: Tensor,
        momentum: Tensor,
        lr: Rate,
        active: Tensor | None,
        weight_decay: Rate = 0.0,
        copy: Tensor | None = None,
        sound: Tensor | None = None,
    ) -> Report:
        """Decay, then `weight -= lr scale msign(momentum)`, slice by slice, and write `copy`.

        Units that are not `sound` `[batch]` keep their weights. Reports `update_rms` and `refused`.
        """
        size = chunk_size(weight.shape[1], weight.shape[2], weight.device)
        slices = (torch.split(x, size) for x in (weight, momentum))
        others = (
            itertools.repeat(None) if x is None else torch.split(x, size) for x in (copy, sound)
        )
        rates = (_split(rate, size) for rate in (lr, weight_decay))
        reports = [
            self.descend_units(w, m, r, active, d, c, s)
            for w, m, c, s, r, d in zip(*slices, *others, *rates, strict=False)
        ]
        return joined(reports)

    def descend_units(
        self,
        weight: Tensor,
        momentum: Tensor,
        lr: Rate,
        active: Tensor | None,
        weight_decay: Rate,
        copy: Tensor | None,
        sound: Tensor | None,
    ) -> Report:
        """Do `descend` on a slice."""
        dtype = working_dtype(momentum, self.dtype)
        polar = polar_of(momentum, coefficients(self.schedule, self.steps, dtype), dtype)
        if sound is not None:
            polar = polar._replace(bounded=polar.bounded & sound)
        return self.apply(weight, polar, lr, active, weight_decay, copy)

    def size_of(self, weight: Tensor, norm: Tensor, active: Tensor | None, sound: Tensor) -> Report:
        """Report update_rms, of directions of Frobenius norm `norm` `[batch]`, and refused."""
        rms = (norm * self.rms_of_norm(weight)).masked_fill_(~sound, 0)
        return {"update_rms": rms, "refused": refused(active, sound)}

    def rms_of_norm(self, weight: Tensor) -> float:
        """Return the ratio of the update's root mean square to its direction's Frobenius norm."""
        shape = matrix_shape(weight)
        return self.scale_of(shape) / math.sqrt(shape[0] * shape[1])

    def accumulate(self, grad: Tensor, state: State, active: Tensor | None) -> Tensor:
        """Return the matrix to orthogonalise, in the buffer of `grad`; updates the momentum."""
        (result,) = self.accumulate_many([grad], [state], active)
        return result

    @torch.no_grad()
    def accumulate_many(
        self, grads: Sequence[Tensor], states: Sequence[State], active: Tensor | None
    ) -> list[Tensor]:
        """Return the matrices to orthogonalise; see `accumulate` and `Rule.accumulate_many`."""
        slices = [
            pair
            for grad, state in zip(grads, states, strict=True)
            for pair in cache_slices(grad, state["momentum"])
        ]
        gate = unless_all(active)
        on_cpu = grads[0].device.type == "cpu"  # which does all of a slice while it is in the cache
        for some in [[pair] for pair in slices] if on_cpu else [slices]:
            gradients, momenta = [g for g, _ in some], [m for _, m in some]
            if gate is not None:
                for g, m in some:
                    torch.where(gate, g, m, out=g)
            torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
            if self.nesterov:
                torch._foreach_lerp_(gradients, momenta, self.momentum)
            else:
                torch._foreach_copy_(gradients, momenta)
        return list(grads)

    def orthogonalize(self, momentum: Tensor) -> Polar:
        """Replace `momentum` by its msign, with this rule's schedule, steps and dtype."""
        return polar_(momentum, schedule=self.schedule, steps=self.steps, dtype=self.dtype)

    def scale_of(self, shape: tuple[int, int]) -> float:
        """Return the factor between `lr` and the update; see `Rule.scale_of`."""
        return self.scale_factor * scaling.update_scale(shape, self.scale)

    def apply(
        self,
        weight: Tensor,
        polar: Polar,
        lr: Rate,
        active: Tensor | None,
        weight_decay: Rate = 0.0,
        copy: Tensor | None = None,
    ) -> Report:
        """Decay, then `weight -= lr scale direction`, and write `copy`.

        A unit whose direction did not stay bounded keeps its weight. Reports `update_rms` and
        `refused`.
        """
        direction, bounded = polar
        gate = taken(active, bounded)
        scale = self.scale_of(matrix_shape(weight))
        norm = kernels.update_(
            weight, direction, lr=lr, weight_decay=weight_decay, scale=scale, active=gate,
            copy=copy,
        )  # fmt: skip
        if norm is not None:
            return self.size_of(weight, norm, active, bounded)
        norms, first = [], 0
        for w, d in cache_slices(weight, direction):
            d = d.to(w.dtype)
            norms.append(torch.linalg.vector_norm(d, dim=(-2, -1)))
            part = slice(first, first + len(w))
            mine = unless_all(gate[part])
            decay_(w, units_of(lr, part), units_of(weight_decay, part), mine)
            subtract_(w, d, units_of(lr, part) * scale, mine)
            first = part.stop
        if copy is not None:
            copy.copy_(weight)
        norm = norms[0] if len(norms) == 1 else torch.cat(norms)
        return self.size_of(weight, norm, active, bounded)

    def apply_many(
        self,
        stacks: Sequence[Stack],
        polars: Sequence[Polar],
        active: Tensor | None,
        weight_decay: Rate = 0.0,
        sound: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> list[Report]:
        """Do `apply` for several stacks, all but the pass over the weights at once.

        Units that are not `sound` `[sum of batches]` take no step. With `scale`
        `[sum of batches]` all weights are multiplied by it before.
        """
        weights = [stack.weight for stack in stacks]
        bounded = together([polar.bounded for polar in polars])
        if sound is not None:
            bounded = bounded & sound
        lr = rate_of_stacks([stack.lr for stack in stacks], weights)
        scales = numbers([self.scale_of(matrix_shape(w)) for w in weights], weights)
        unit = numbers([1.0] * len(stacks), weights)
        decays = isinstance(weight_decay, Tensor) or weight_decay != 0
        norm = kernels.update_many_(
            weights,
            [polar.direction for polar in polars],
            step=scales * lr,
            factor=unit * (1 - lr * weight_decay) if decays else unit,
            active=taken(active, bounded),
            copies=[stack.state.get(COPY) for stack in stacks],
            scale=scale,
        )
        if norm is None:
            if scale is not None:
                scale_(weights, scale)
            return [
                self.apply(
                    stack.weight, Polar(polar.direction, each), stack.lr, active, weight_decay,
                    stack.state.get(COPY),
                )
                for stack, polar, each in zip(stacks, polars, apart(bounded, weights), strict=True)
            ]  # fmt: skip
        ratios = numbers([self.rms_of_norm(w) for w in weights], weights)
        rms = (norm * ratios).masked_fill_(~bounded, 0)
        figures = zip(apart(rms, weights), apart(refused(active, bounded), weights), strict=True)
        return [{"update_rms": each, "refused": missed} for each, missed in figures]


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """Return the shape of each matrix of `weight` `[..., rows, cols]`."""
    rows, cols = weight.shape[-2:]
    return rows, cols


def scale_(weights: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply the weights of stacks by `scale` `[sum of batches]` in place."""
    for w, each in zip(weights, apart(scale[:, None, None], weights), strict=True):
        w.mul_(each)


def joined(reports: Sequence[Report]) -> Report:
    """Join the reports of slices of a stack."""
    if len(reports) == 1:
        return reports[0]
    return {name: torch.cat([report[name] for report in reports]) for name in reports[0]}


def _split(rate: Rate, size: int) -> Iterable[Rate]:
    """Yield the rates of successive slices of `size` units."""
    if isinstance(rate, Tensor) and rate.ndim:
        return torch.split(rate, size)
    return itertools.repeat(rate)
