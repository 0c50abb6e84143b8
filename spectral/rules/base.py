"""The interface of update rules: pure batched steps on stacked parameters, with their state.

The one-process optimizer and the distributed one call the same rules, so the mathematics exists
once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

State = dict[str, Tensor]
Report = dict[str, Tensor]

Stack = tuple[Tensor, Tensor, State]
"""Weights and gradients `[batch, ...]` of one shape, and their state."""

COPY = "copy"
"""Entry of a state, if there is one: the weight in the dtype that the model reads, which a rule
with `writes_copy` writes whenever it writes the weight."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """One update rule. Its fields are its hyper-parameters and double as a config section."""

    whole_matrix: ClassVar[bool]
    """True: needs whole matrices `[batch, rows, cols]`. False: elementwise, any slice."""
    takes_vectors: ClassVar[bool] = False
    """True: a whole-matrix rule that also has a step for whole vectors `[batch, n]`."""
    writes_copy: ClassVar[bool] = False
    """True: writes the state's COPY, in the pass that updates the weight where there is one."""
    elementwise_state: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that have the shape of the weight and start at 0, for `accumulate`."""

    @abstractmethod
    def init_state(self, weight: Tensor) -> State:
        """The state of `weight`, every tensor with a leading batch dimension, same keys always."""

    def accumulate(self, grad: Tensor, state: State, active: Tensor | None) -> Tensor:
        """What `update` works on, of the shape of `grad` and in its buffer: here `grad` itself.

        Elementwise, so it may run on any slice of a matrix; it reads and writes only the entries of
        `state` named in `elementwise_state`.
        """
        return grad

    @abstractmethod
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
        """Figures of the step's second half, from what `accumulate` returned as `momentum`.

        `update_rms` and `refused` are among them. A unit (an element, for an elementwise rule)
        whose step is not sound keeps its weight and counts as refused: a weight that is finite stays
        so, whatever `momentum` and `state` hold.
        """

    @torch.no_grad()
    def step(
        self,
        weight: Tensor,
        grad: Tensor,
        state: State,
        *,
        lr: float | Tensor,
        weight_decay: float | Tensor = 0.0,
        active: Tensor | None = None,
    ) -> Report:
        """Figures of the step, each `[batch]`; updates `weight` and `state`, may overwrite `grad`.

        `active` is a 0-d bool tensor; False leaves weight and state as they are, bit for bit,
        whatever `grad` holds, without a host sync.
        """
        momentum = self.accumulate(grad, state, active)
        return self.update(weight, momentum, state, lr=lr, weight_decay=weight_decay, active=active)

    def step_many(
        self,
        stacks: Sequence[Stack],
        *,
        lr: float | Tensor,
        weight_decay: float | Tensor = 0.0,
        active: Tensor | None = None,
    ) -> list[Report]:
        """The reports of `step` on stacks of different shapes, whose products a rule may join."""
        return [
            self.step(weight, grad, state, lr=lr, weight_decay=weight_decay, active=active)
            for weight, grad, state in stacks
        ]


def require(condition: bool, message: str) -> None:
    """Nothing, or a ValueError with `message`."""
    if not condition:
        raise ValueError(message)


def require_fraction(name: str, value: float) -> None:
    """Nothing, or a ValueError unless `0 <= value < 1`."""
    require(0.0 <= value < 1.0, f"{name} must be in [0, 1), got {value}")


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Nothing, or a ValueError unless `value` is one of `choices`."""
    require(value in choices, f"{name} must be one of {choices}, got {value!r}")


def require_matrices(weight: Tensor, rule: str) -> None:
    """Nothing, or a ValueError unless `weight` is a stack of matrices."""
    require(
        weight.ndim == 3,
        f"{rule} needs whole matrices [batch, rows, cols], got shape {tuple(weight.shape)}",
    )


def decay_(
    weight: Tensor, lr: float | Tensor, weight_decay: float | Tensor, active: Tensor | None
) -> None:
    """Nothing; decoupled weight decay in place: `weight *= 1 - lr weight_decay`."""
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return
    # In the weight's dtype from the start: a float32 factor would round a float64 weight.
    factor = weight.new_ones(()) - lr * weight_decay
    if active is not None:
        factor = torch.where(_per_unit(active, weight), factor, torch.ones_like(factor))
    weight.mul_(factor)


def subtract_(
    weight: Tensor, direction: Tensor, size: float | Tensor, active: Tensor | None
) -> None:
    """Nothing; `weight -= size * direction` in place, or nothing at all. Overwrites `direction`."""
    if active is not None:
        direction.masked_fill_(~_per_unit(active, direction), 0)
    if isinstance(size, Tensor):
        # A device scalar cannot be `alpha`; `direction` is ours to scale.
        weight.sub_(direction.mul_(size))
    else:
        weight.sub_(direction, alpha=size)


def _per_unit(active: Tensor, x: Tensor) -> Tensor:
    """A predicate, 0-d or `[batch]`, in a shape that broadcasts over `x` `[batch, ...]`."""
    return active.view(-1, *(1,) * (x.ndim - 1)) if active.ndim else active


def taken(active: Tensor | None, sound: Tensor) -> Tensor:
    """Whether each unit takes its step `[batch]`: where `active`, 0-d, and its step is `sound`."""
    return sound if active is None else sound & active


def refused(active: Tensor | None, sound: Tensor) -> Tensor:
    """1 for each unit whose step was not `sound` `[batch]`, 0 elsewhere and on inactive steps."""
    unsound = ~sound
    return (unsound if active is None else unsound & active).float()
