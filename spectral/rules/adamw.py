"""AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization")."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spectral.rules.base import (
    Rate,
    Report,
    Rule,
    State,
    decay_,
    require,
    require_fraction,
    subtract_,
)

LARGEST_STEP = 1e3
"""Largest step of an element, in learning rates. Sound moments give at most 1.2 with the default
decays and 7.3 with beta2 0.999 (Cauchy and Schwarz on the two means)."""


@dataclass(frozen=True, kw_only=True)
class AdamWRule(Rule):
    """AdamW, elementwise; equals `torch.optim.AdamW`."""

    whole_matrix: ClassVar[bool] = False

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
        return {
            "momentum": torch.zeros_like(weight),
            "variance": torch.zeros_like(weight),
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
        """Decay and step the weights; reports `update_rms` and `refused`. See `Rule.update`.

        An element whose step is not finite, or beyond `LARGEST_STEP`, is not stepped, and `refused`
        is how many there are. Each element is judged by itself, so that it does not matter which
        ones are stepped together.
        """
        grad = momentum  # `accumulate` returns the gradient itself
        mean, variance, count = state["momentum"], state["variance"], state["step"]
        if active is None:
            count.add_(1)
            mean.lerp_(grad, 1 - self.beta1)
            variance.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        else:
            count.add_(active.to(count.dtype))
            torch.where(active, mean + (grad - mean) * (1 - self.beta1), mean, out=mean)
            new = variance * self.beta2 + (1 - self.beta2) * grad * grad
            torch.where(active, new, variance, out=variance)
        decay_(weight, lr, weight_decay, active)
        shape = (-1, *(1,) * (weight.ndim - 1))
        exponent = count.clamp_min(1).double()
        first = (1 - self.beta1**exponent).to(weight.dtype).view(shape)
        second = (1 - self.beta2**exponent).sqrt().to(weight.dtype).view(shape)
        direction = torch.sqrt(variance, out=grad).div_(second).add_(self.epsilon)
        torch.div(mean / first, direction, out=direction)
        unsound = ~(direction.abs() <= LARGEST_STEP)
        direction.masked_fill_(unsound, 0)
        rms = direction.flatten(1).square().mean(1).sqrt()
        subtract_(weight, direction, lr, active)
        many = unsound.flatten(1).sum(1).float()
        return {"update_rms": rms, "refused": many if active is None else many * active}
