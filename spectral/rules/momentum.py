"""What rules have in common that step along an exponential mean of the gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..device_values import unless_all
from ..polar import CACHE_ELEMENTS, cache_slices
from .base import Rule, State, require, require_fraction


@dataclass(frozen=True, kw_only=True)
class MomentumRule(Rule):
    """A rule of whole matrices with momentum: a subclass writes `update`, from the mean."""

    whole_matrix: ClassVar[bool] = True
    elementwise_state: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    """Decay of the mean of the gradient, in [0, 1)."""
    nesterov: bool = True
    """Step along `(1 - momentum) G + momentum M` instead of the mean M."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("momentum", self.momentum)

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum, of the shape of `weight` `[batch, rows, cols]`."""
        rule, shape = type(self).__name__, tuple(weight.shape)
        require(
            weight.ndim == 3, f"{rule} needs whole matrices [batch, rows, cols], got shape {shape}"
        )
        return {"momentum": torch.zeros_like(weight)}

    def accumulate(
        self, grads: Sequence[Tensor], states: Sequence[State], active: Tensor | None
    ) -> list[Tensor]:
        """Update the means and return what to step along; see `Rule.accumulate`."""
        means = [state["momentum"] for state in states]
        # Without a predicate the library joins all tensors, of which there may be many small ones.
        if active is not None and kernels.updates([*grads, *means]):
            from ..kernels.momentum import average_

            for grad, mean in zip(grads, means, strict=True):
                average_(grad, mean, self.momentum, active, nesterov=self.nesterov)
            return list(grads)
        slices = [
            pair
            for grad, mean in zip(grads, means, strict=True)
            for pair in cache_slices(grad, mean)
        ]
        gate = unless_all(active)
        # All together; a CPU does all of some while they are in its cache.
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
    """Return the new mean M and what a rule steps along, of one gradient `[rows, cols]`."""
    mu, G = rule.momentum, grad
    M = mu * state["momentum"] + (1 - mu) * G
    return M, mu * M + (1 - mu) * G if rule.nesterov else M
