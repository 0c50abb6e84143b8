"""AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization"), by PyTorch's fused step.

A fused step has no guard of its own. Finite gradients leave finite moments, and those make bounded
steps, so what has to be checked is the gradient, which the clip's norm has read, and moments that
somebody else has written. `AdamWRule.step` looks at both, unit by unit; `step_many` leaves trusted
stacks to one call, which the predicate alone can skip.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import (
    Rate,
    Report,
    Rule,
    Stack,
    State,
    decay_,
    per_unit,
    refused,
    require,
    require_fraction,
    taken,
)

LARGEST_STEP = 1e3
"""Largest step that moments are believed, in learning rates, as the root mean square of a unit.
Sound moments give elements at most 1.2 with the default decays and 7.3 with beta2 0.999 (Cauchy and
Schwarz on the two means)."""


@dataclass(frozen=True, kw_only=True)
class AdamWRule(Rule):
    """AdamW, elementwise; equals `torch.optim.AdamW`."""

    whole_matrix: ClassVar[bool] = False
    joins_shapes: ClassVar[bool] = True

    beta1: float = 0.9
    """Decay of the mean of the gradient, in [0, 1)."""
    beta2: float = 0.95
    """Decay of the mean of the squared gradient, in [0, 1)."""
    epsilon: float = 1e-8
    """Added to the root of the second moment; positive."""

    def __post_init__(self) -> None:
        require_fraction("beta1", self.beta1)
        require_fraction("beta2", self.beta2)
        require(self.epsilon > 0, f"epsilon must be positive, got {self.epsilon}")

    def init_state(self, weight: Tensor) -> State:
        """Create moments of the shape of `weight` and a step counter `[batch]`."""
        layout = torch.contiguous_format
        return {
            "momentum": torch.zeros_like(weight, memory_format=layout),
            "variance": torch.zeros_like(weight, memory_format=layout),
            "step": weight.new_zeros(weight.shape[0], dtype=torch.float32),
        }

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
        """Decay and step the weights, unit by unit; reports `refused`. See `Rule.update`.

        A unit whose gradient or moments are not sound keeps weight and moments.
        """
        wide = torch.promote_types(momentum.dtype, torch.float32)
        norms = torch.linalg.vector_norm(momentum.flatten(1), dim=1, dtype=wide)
        sound = norms.isfinite() & self.sound_state(state)
        gate = taken(active, sound)
        if isinstance(weight_decay, Tensor):  # the fused step takes a number
            decay_(weight, lr, weight_decay, gate)
        decay = 0.0 if isinstance(weight_decay, Tensor) else weight_decay
        rate = per_unit_rates(lr, weight)
        state["step"].add_(1 if active is None else active)
        whole = (weight, momentum, state["momentum"], state["variance"])
        dense = [tensor.contiguous() for tensor in whole]
        for i, skipped in enumerate((~gate).float().unbind()):
            parts = [[tensor[i]] for tensor in dense]
            self.advance_(parts, [state["step"][i]], rate[i], decay, skipped)
        for tensor, copy in zip(whole, dense, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
        return {"refused": refused(active, sound)}

    @torch.no_grad()
    def step_many(
        self, stacks: Sequence[Stack], *, weight_decay: Rate = 0.0, active: Tensor | None = None
    ) -> list[Report]:
        """Step stacks; all units of trusted ones with one rate in a single call. See
        `Rule.step_many`."""
        joined: dict[object, list[Stack]] = {}
        reports: list[Report] = []
        for stack in stacks:
            weight, grad, state, lr, _ = stack
            if not joinable(stack) or isinstance(weight_decay, Tensor):
                options = {"lr": lr, "weight_decay": weight_decay, "active": active}
                reports.append(self.step(weight, grad, state, **options))  # type: ignore[arg-type]
                continue
            joined.setdefault(id(lr) if isinstance(lr, Tensor) else lr, []).append(stack)
            reports.append({})
        # As a tensor that is counted up by, and as the flag of a fused step.
        stepped = None if active is None else active.float()
        skipped = None if stepped is None else 1 - stepped
        for together in joined.values():
            assert not isinstance(weight_decay, Tensor)
            counts = [stack.state["step"] for stack in together]
            if stepped is None:
                torch._foreach_add_(counts, 1)
            else:
                # Without `alpha`, PyTorch would read the tensor's value.
                torch._foreach_add_(counts, stepped, alpha=1)
            each = [
                [unit for stack in together for unit in tensor_of(stack).unbind()]
                for tensor_of in TENSORS
            ]
            steps = [unit for count in counts for unit in count.unbind()]
            self.advance_(each, steps, together[0].lr, weight_decay, skipped)
        return reports

    def advance_(
        self,
        tensors: Sequence[list[Tensor]],
        steps: list[Tensor],
        lr: Rate,
        weight_decay: float,
        skipped: Tensor | None,
    ) -> None:
        """Take PyTorch's fused step, of weights, gradients and moments, unless `skipped` is 1."""
        weights, grads, means, variances = tensors
        on_gpu = weights[0].is_cuda
        torch._fused_adamw_(
            weights,
            grads,
            means,
            variances,
            [],
            steps,
            lr=lr.float() if isinstance(lr, Tensor) and on_gpu else lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )

    def sound_state(self, state: State) -> Tensor:
        """Return whether the moments of each unit can be those of finite gradients, `[batch]`.

        Means are then not larger than `LARGEST_STEP` times the roots of the second moments.
        """
        wide = torch.promote_types(state["momentum"].dtype, torch.float32)
        mean, variance = state["momentum"].flatten(1), state["variance"].flatten(1)
        size = torch.linalg.vector_norm(mean, dim=1, dtype=wide)
        scale = variance.sum(1, dtype=wide).sqrt() + self.epsilon * mean.shape[1] ** 0.5
        sound: Tensor = size.isfinite() & (size <= LARGEST_STEP * scale) & (state["step"] >= 0)
        if mean.shape[1]:
            sound &= variance.amin(1) >= 0
        return sound

    @torch.no_grad()
    def figures(self, state: State) -> Report:
        """Compute `update_rms` of the last step; see `Rule.figures`."""
        mean, variance, count = state["momentum"], state["variance"], state["step"]
        exponent = count.clamp_min(1).double().view(-1, *(1,) * (mean.ndim - 1))
        first = (1 - self.beta1**exponent).to(mean.dtype)
        second = (1 - self.beta2**exponent).sqrt().to(mean.dtype)
        direction = (mean / first) / (variance.sqrt().div_(second).add_(self.epsilon))
        return {"update_rms": direction.flatten(1).square().mean(1).sqrt()}


TENSORS: tuple[Callable[[Stack], Tensor], ...] = (
    lambda stack: stack.weight,
    lambda stack: stack.grad,
    lambda stack: stack.state["momentum"],
    lambda stack: stack.state["variance"],
)
"""What the fused step reads, in its order."""


def joinable(stack: Stack) -> bool:
    """Return whether a stack is trusted, has one rate, and lies as the fused step wants it."""
    single = not isinstance(stack.lr, Tensor) or stack.lr.ndim == 0
    return stack.trusted and single and all(of(stack).is_contiguous() for of in TENSORS)


def per_unit_rates(lr: Rate, weight: Tensor) -> Sequence[Rate]:
    """Return the rate of each unit of `weight` `[batch, ...]`.

    Raises ValueError for a tensor of another shape than `[]` or `[batch]`.
    """
    rates = per_unit(lr, weight)
    if isinstance(rates, Tensor) and rates.ndim:
        return rates.flatten().unbind()
    return [rates] * len(weight)
