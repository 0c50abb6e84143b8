"""Muon: orthogonalised momentum (K. Jordan et al., 2024), and the parts shared with other rules.

This file contains, from top to bottom, the gradient's moving average (`MomentumRule`), its polar
factor (`MsignRule`), the weight update (`PolarRule`), Muon itself, and Muon in plain code
(`reference`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels
from ..batching import concat, numbers, split_figures, split_like
from ..device_values import unless_all
from ..polar import (
    CACHE_ELEMENTS,
    SCHEDULES,
    Polar,
    cache_slices,
    coefficients,
    msign_cost,
    normalized_,
    polars_of,
)
from ..sphere import SCALES, Scale
from .base import (
    Report,
    Rule,
    Stack,
    State,
    decay_,
    rate_of_stacks,
    refused,
    require,
    require_choice,
    require_fraction,
    subtract_,
    taken,
)


@dataclass(frozen=True, kw_only=True)
class MomentumRule(Rule):
    """A whole-matrix rule with momentum. Subclasses implement `update`."""

    whole_matrix: ClassVar[bool] = True
    elementwise_state: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    """Decay rate of the gradient's moving average, in [0, 1)."""
    nesterov: bool = True
    """Step along `(1 - momentum) G + momentum M` instead of the moving average M."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("momentum", self.momentum)

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum with the shape of `weight` `[batch, rows, cols]`."""
        rule, shape = type(self).__name__, tuple(weight.shape)
        require(
            weight.ndim == 3,
            f"{rule} requires whole matrices [batch, rows, cols], got shape {shape}",
        )
        return {"momentum": torch.zeros_like(weight)}

    def accumulate(
        self, grads: Sequence[Tensor], states: Sequence[State], active: Tensor | None
    ) -> list[Tensor]:
        """Update the momenta and return the step directions. See `Rule.accumulate`."""
        means = [state["momentum"] for state in states]
        # Without an active flag, torch handles many small tensors in a single call.
        if active is not None and kernels.updates([*grads, *means]):
            from ..kernels.update import average_

            for grad, mean in zip(grads, means, strict=True):
                average_(grad, mean, self.momentum, active, nesterov=self.nesterov)
            return list(grads)
        slices = [
            pair
            for grad, mean in zip(grads, means, strict=True)
            for pair in cache_slices(grad, mean)
        ]
        gate = unless_all(active)
        # A GPU processes all tensors at once; a CPU processes as many as fit in its cache.
        limit = CACHE_ELEMENTS.get(grads[0].device.type)
        count = len(slices) if limit is None else max(1, limit // max(1, slices[0][0].numel()))
        for first in range(0, len(slices), count):
            gradients, momenta = map(list, zip(*slices[first : first + count], strict=True))
            if gate is not None:
                for g, m in zip(gradients, momenta, strict=True):
                    torch.where(gate, g, m, out=g)
            torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
            if self.nesterov:
                torch._foreach_lerp_(gradients, momenta, self.momentum)
            else:
                torch._foreach_copy_(gradients, momenta)
        return list(grads)


def momentum_of(rule: MomentumRule, grad: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return the new mean M and the step direction for one gradient `[rows, cols]`."""
    mu, G = rule.momentum, grad
    M = mu * state["momentum"] + (1 - mu) * G
    return M, mu * M + (1 - mu) * G if rule.nesterov else M


MsignDtype = Literal["float32", "bfloat16", "float16"]
DTYPES = {str(d)[6:]: d for d in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, kw_only=True)
class MsignRule(Rule):
    """A whole-matrix rule that uses msign; its fields include msign's settings."""

    whole_matrix: ClassVar[bool] = True

    schedule: str = "polar_express"
    """Polynomial schedule of msign: a key of `spectrain.polar.SCHEDULES`."""
    steps: int = 8
    """Number of msign steps, at least 1."""
    msign_dtype: MsignDtype | None = None
    """Dtype of the matmuls in msign; null means the weight's dtype."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("schedule", self.schedule, tuple(SCHEDULES))
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the matmuls in msign (None: the weight's dtype)."""
        return None if self.msign_dtype is None else DTYPES[self.msign_dtype]

    def cost(self, shape: Sequence[int]) -> float:
        """Return the FLOPs of one step: elementwise passes plus, for a matrix, `matrix_cost`."""
        elementwise = super().cost(shape)
        if len(shape) < 2:
            return elementwise
        short, long = sorted(shape)
        return elementwise + self.matrix_cost(short, long)

    def matrix_cost(self, short: int, long: int) -> float:
        """Return the matmul FLOPs of one step on a matrix with sides `short <= long`."""
        return self.msign_cost(short, long)

    def msign_cost(self, short: int, long: int) -> float:
        """Return the FLOPs of one msign evaluation on a matrix with sides `short <= long`."""
        dtype = torch.float32 if self.dtype is None else self.dtype
        return msign_cost(short, long, steps=self.steps, dtype=dtype, schedule=self.schedule)

    def polars(self, matrices: Sequence[Tensor]) -> list[Polar]:
        """Return the polar factors of stacks `[batch, rows, cols]`. The stacks are overwritten."""
        dtype = self.dtype or matrices[0].dtype
        polynomials = coefficients(self.schedule, self.steps, dtype)
        return polars_of([normalized_(x, dtype) for x in matrices], polynomials, dtype)


@dataclass(frozen=True, kw_only=True)
class PolarRule(MomentumRule, MsignRule):
    """A whole-matrix rule that steps along polar factors with a shape-dependent scale."""

    scale: Scale = "spectral_mup"
    """Formula for the shape-dependent update scale (docs/spectral.md)."""
    scale_factor: float = 1.0
    """Positive multiplier for the update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale_factor > 0, f"scale_factor must be positive, got {self.scale_factor}")

    def apply(
        self,
        stacks: Sequence[Stack],
        polars: Sequence[Polar],
        *,
        sound: Tensor | None = None,
        retraction: Tensor | None = None,
        decays: bool = False,
    ) -> list[Report]:
        """Compute `weight -= lr scale direction`, after weight decay if `decays`.

        If `retraction` `[sum of batches]` is given, weights are first multiplied by `retraction`. A
        unit's weight is left bitwise unchanged if the unit is not `sound` `[sum of batches]` or its
        direction did not stay bounded. Reports `update_rms` and `refused`, both `[batch]`, for each
        stack.
        """
        weights = [stack.weight for stack in stacks]
        active = stacks[0].step.active
        bounded = concat([polar.bounded for polar in polars])
        sound = bounded if sound is None else bounded & sound
        gate = taken(active, sound)
        if kernels.updates(weights):
            norms = self._update_by_kernel(stacks, polars, gate, retraction, decays)
        else:
            if retraction is not None:
                factors = split_like(retraction.masked_fill(~gate, 1)[:, None, None], weights)
                for weight, factor in zip(weights, factors, strict=True):
                    weight.mul_(factor)
            gates = split_like(gate, weights)
            norms = concat(
                [
                    self._update(stack, polar, part, decays=decays)
                    for stack, polar, part in zip(stacks, polars, gates, strict=True)
                ]
            )
        shapes = [weight.shape[1:] for weight in weights]
        sizes = [self.update_scale(shape) / math.sqrt(shape.numel()) for shape in shapes]
        rms = (norms * numbers(sizes, weights)).masked_fill_(~sound, 0)
        return split_figures({"update_rms": rms, "refused": refused(active, sound)}, weights)

    def _update_by_kernel(
        self,
        stacks: Sequence[Stack],
        polars: Sequence[Polar],
        gate: Tensor,
        retraction: Tensor | None,
        decays: bool,
    ) -> Tensor:
        """Retract, decay and update all stacks; return the direction norms `[sum of batches]`."""
        from ..kernels.update import update_

        weights = [stack.weight for stack in stacks]
        lr = rate_of_stacks([stack.step.lr for stack in stacks], weights)
        decay = rate_of_stacks([stack.step.weight_decay for stack in stacks], weights)
        unit = numbers([1.0] * len(stacks), weights)
        scales = [self.update_scale(weight.shape[1:]) for weight in weights]
        step = numbers(scales, weights) * lr
        decays = decays and (isinstance(decay, Tensor) or decay != 0)
        factor = unit * (1 - lr * decay) if decays else unit
        columns = [split_like(x, weights) for x in (factor, step, gate)]
        none = (None,) * len(stacks)
        retractions = none if retraction is None else split_like(retraction, weights)
        squares = [
            update_(w, polar.direction, f, s, active, r, self.cautious)
            for w, polar, f, s, active, r in zip(
                weights, polars, *columns, retractions, strict=True
            )
        ]
        return concat(squares).sqrt()

    def _update(self, stack: Stack, polar: Polar, gate: Tensor, *, decays: bool) -> Tensor:
        """Update a stack without kernels, and return the direction norms `[batch]`."""
        lr, weight_decay, _ = stack.step
        scale = self.update_scale(stack.weight.shape[1:])
        norms, first = [], 0
        for w, d in cache_slices(stack.weight, polar.direction):
            d = d.to(w.dtype)
            norms.append(torch.linalg.vector_norm(d, dim=(-2, -1)))
            active = unless_all(gate[first : first + len(w)])
            if decays:
                decay_(w, lr, weight_decay, active, d if self.cautious else None)
            subtract_(w, d, lr * scale, active)
            first += len(w)
        return concat(norms)

    def scale_of(self, shape: Sequence[int]) -> float | None:
        """Return the spectral norm of the update divided by lr. See `Rule.scale_of`."""
        return self.update_scale(shape)

    def update_scale(self, shape: Sequence[int]) -> float:
        """Return the `scale` in the update `lr scale direction` of a `[rows, cols]` unit."""
        return self.scale_factor * SCALES[self.scale](*shape)


@dataclass(frozen=True, kw_only=True)
class MuonRule(PolarRule):
    """Whole-matrix Muon, equivalent to `torch.optim.Muon` with the same coefficients and dtype."""

    reads_weight: ClassVar[bool] = False

    cautious_decay: bool = False
    """Do not decay entries that the update increases in magnitude ("Cautious Weight Decay", Chen et
    al., 2025)."""

    @property
    def cautious(self) -> bool:
        """Whether weight decay only applies to entries that the update shrinks."""
        return self.cautious_decay

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay the weights, then compute `weight -= lr scale msign(momentum)`. See `Rule.update`.

        Reports `update_rms` and `refused`.
        """
        momenta = [stack.grad for stack in stacks]  # the result of `accumulate`
        return self.apply(stacks, self.polars(momenta), decays=True)


def reference(
    rule: MuonRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum [rows, cols]
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with Muon in plain code. `MuonRule` computes the same update.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
    https://kellerjordan.github.io/posts/muon. Weight decay is decoupled, as in AdamW.
    """
    W = weight
    M, B = momentum_of(rule, grad, state)  # mean M of the gradients, B with Nesterov's look-ahead
    X = B / B.norm()  # singular values in [0, 1]
    for a, b, c in coefficients(rule.schedule, rule.steps, W.dtype):  # Newton-Schulz: msign(B)
        A = X @ X.mT  # [rows, rows]
        X = a * X + (b * A + c * A @ A) @ X  # each singular value s becomes a s + b s^3 + c s^5
    D = rule.update_scale(W.shape) * X  # times sqrt(rows / cols) with the scale spectral_mup
    decays = W * D >= 0 if rule.cautious_decay else torch.ones_like(W)  # "Cautious Weight Decay"
    W = W - lr * weight_decay * decays * W
    return W - lr * D, {"momentum": M}
