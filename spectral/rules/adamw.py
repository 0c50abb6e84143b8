"""AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization") with PyTorch's fused step.

The fused step does not check its inputs. As long as gradients and moments are finite, moments stay
finite and steps stay bounded. The optimizer checks gradients at every step; moments are checked
when a checkpoint is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import ClassVar

import torch
from torch import Tensor

from ..batching import grouped
from .base import Report, Rule, Stack, State, Step, decay_, require, require_fraction

ENTRIES = ("momentum", "variance", "step")
"""State keys."""


@dataclass(frozen=True, kw_only=True)
class AdamWRule(Rule):
    """Elementwise AdamW, equivalent to `torch.optim.AdamW`."""

    whole_matrix: ClassVar[bool] = False

    beta1: float = 0.9
    """Decay rate of the gradient's moving average, in [0, 1)."""
    beta2: float = 0.95
    """Decay rate of the squared gradient's moving average, in [0, 1)."""
    epsilon: float = 1e-8
    """Positive number added to the square root of the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("beta1", self.beta1)
        require_fraction("beta2", self.beta2)
        require(self.epsilon > 0, f"epsilon must be positive, got {self.epsilon}")

    def init_state(self, weight: Tensor) -> State:
        """Create moments with the shape of `weight`, and step counters `[batch]`."""
        layout = torch.contiguous_format
        return {
            "momentum": torch.zeros_like(weight, memory_format=layout),
            "variance": torch.zeros_like(weight, memory_format=layout),
            "step": weight.new_zeros(weight.shape[0], dtype=torch.float32),
        }

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Update and decay weights, with one call per set of rates. See `Rule.update`."""
        for members in grouped(stacks, lambda stack: stack.step.rates).values():
            entries = [[stack.state[name] for stack in members] for name in ENTRIES]
            lists = [[s.weight for s in members], [s.grad for s in members], *entries]
            if any(len(count) > 1 for count in entries[-1]):
                # Split tensors `[batch, ...]` into units, each with its own counter.
                lists = [[unit for x in tensors for unit in x.unbind()] for tensors in lists]
            self.advance_(lists, members[0].step)
        return [{} for _ in stacks]

    def advance_(self, lists: Sequence[list[Tensor]], step: Step) -> None:
        """Run PyTorch's fused step on units with the same dtype, device and rates.

        `lists` holds the weights, gradients, means, variances and step counters of the units.
        """
        lr, weight_decay, active = step
        weights, counts = lists[0], lists[-1]
        if isinstance(weight_decay, Tensor):  # the fused step requires a number
            for weight in weights:
                decay_(weight, lr, weight_decay, active)
            weight_decay = 0.0
        shapes = [weight.shape for weight in weights]
        if any([x.shape for x in moments] != shapes for moments in lists[2:4]):
            raise ValueError(
                "moments must have the same shape as their weight"
            )  # unchecked by torch
        taken = torch.ones((), device=counts[0].device) if active is None else active.float()
        torch._foreach_add_(counts, taken, alpha=1)
        dense = [[x.contiguous() for x in tensors] for tensors in lists[:4]]
        parameters, gradients, means, variances = dense
        torch._fused_adamw_(
            parameters,
            gradients,
            means,
            variances,
            [],
            counts,
            lr=lr.float() if isinstance(lr, Tensor) and weights[0].is_cuda else lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=None if active is None else 1 - taken,
        )
        for i in (0, 2, 3):  # gradients may be expanded and are not written back
            tensors, copies = lists[i], dense[i]
            if not all(map(is_, tensors, copies)):
                torch._foreach_copy_(tensors, copies)


def reference(
    rule: AdamWRule,
    weight: Tensor,  # any shape, like the gradient and the moments
    grad: Tensor,
    state: State,  # momentum, variance, step 0-d
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one weight with AdamW in plain code. `AdamWRule` computes the same update.

    Source: "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2.
    """
    t = float(state["step"]) + 1
    m = rule.beta1 * state["momentum"] + (1 - rule.beta1) * grad
    v = rule.beta2 * state["variance"] + (1 - rule.beta2) * grad.square()
    m_hat = m / (1 - rule.beta1**t)
    v_hat = v / (1 - rule.beta2**t)
    W = weight * (1 - lr * weight_decay)
    return W - lr * m_hat / (v_hat.sqrt() + rule.epsilon), {
        "momentum": m,
        "variance": v,
        "step": state["step"] + 1,
    }
