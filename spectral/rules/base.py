"""Interface of update rules: pure batched steps on stacked parameters, with their state.

The one-process optimizer and the distributed one call the same rules, so the mathematics exists
once. Routing, planning and monitoring learn about a rule from its methods alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..cost import ELEMENTWISE_FLOPS, Product, product_flops
from ..joined_stacks import together
from ..kernels import per_matrix

State = dict[str, Tensor]
Report = dict[str, Tensor]
Rate = float | Tensor
"""A learning rate or weight decay: a number, a 0-d tensor, or `[batch]`, one per unit."""

COPY = "copy"
"""Optional entry of a state: the weight in the dtype that the model reads. A rule with
`writes_copy` writes it whenever it writes the weight."""


class Stack(NamedTuple):
    """Units of one shape that a rule steps together.

    Attributes:
        weight, grad: `[batch, ...]`.
        state: of the rule.
        lr: of all units or of each.
        trusted: whether state and, in an active step, gradient are known to be sound, so that a
            rule need not look at them.
    """

    weight: Tensor
    grad: Tensor
    state: State
    lr: Rate
    trusted: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """One update rule. Its fields are its hyper-parameters and double as a config section."""

    whole_matrix: ClassVar[bool]
    """True: needs whole matrices `[batch, rows, cols]`. False: elementwise, any slice."""
    takes_vectors: ClassVar[bool] = False
    """True: a whole-matrix rule that also has a step for whole vectors `[batch, n]`."""
    writes_copy: ClassVar[bool] = False
    """True: writes the state's COPY, in the pass that updates the weight where there is one."""
    joins_shapes: ClassVar[bool] = False
    """True: `step_many` and `update_many` share work among stacks of different shapes."""
    reads_weight: ClassVar[bool] = True
    """False: a step reads the weight only to decay it and to subtract the update."""
    elementwise_state: ClassVar[tuple[str, ...]] = ()
    """Entries of the state that have the shape of the weight and start at 0, for `accumulate`."""

    @abstractmethod
    def init_state(self, weight: Tensor) -> State:
        """Create the state of `weight`, every tensor with a leading batch dimension.

        The keys are the same for every weight and at every step.
        """

    def decay_problem(self, weight_decay: float) -> str | None:
        """Return why the rule cannot use this weight decay, None if it can."""
        return None

    def accumulate(self, grad: Tensor, state: State, active: Tensor | None) -> Tensor:
        """Return what `update` works on, of the shape of `grad` and in its buffer; here `grad`.

        Elementwise, so it may run on any slice of a matrix; it reads and writes only the entries of
        `state` named in `elementwise_state`.
        """
        return grad

    def accumulate_many(
        self, grads: Sequence[Tensor], states: Sequence[State], active: Tensor | None
    ) -> list[Tensor]:
        """Do `accumulate` for several tensors, which a rule may launch together."""
        return [
            self.accumulate(grad, state, active) for grad, state in zip(grads, states, strict=True)
        ]

    @abstractmethod
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
        """Take the second half of a step, from `momentum`, which `accumulate` returned.

        Updates `weight` and `state`, may overwrite `momentum`, and returns the report of `step`, of
        which `refused` is always part. A unit whose step is not sound keeps its weight and is
        counted as refused: a finite weight stays finite, whatever `momentum` and `state` hold.
        """

    def update_many(
        self, stacks: Sequence[Stack], *, weight_decay: Rate = 0.0, active: Tensor | None = None
    ) -> list[Report]:
        """Do `update` for stacks of different shapes, which a rule may join.

        `grad` of each stack is what `accumulate` returned.
        """
        return [
            self.update(weight, momentum, state, lr=lr, weight_decay=weight_decay, active=active)
            for weight, momentum, state, lr, _ in stacks
        ]

    @torch.no_grad()
    def step(
        self,
        weight: Tensor,
        grad: Tensor,
        state: State,
        *,
        lr: Rate,
        weight_decay: Rate = 0.0,
        active: Tensor | None = None,
    ) -> Report:
        """Step `weight` and `state` in place and return figures of the step, each `[batch]`.

        Args:
            weight: `[batch, ...]`, one row per unit.
            grad: the gradient, of the shape of `weight`; may be overwritten.
            state: from `init_state`.
            lr, weight_decay: for all units or, as `[batch]` tensors, for each.
            active: 0-d bool tensor; False leaves weight and state as they are, bit for bit,
                whatever `grad` holds, without a host sync.

        Raises:
            ValueError: a rate that is a tensor of another shape than `[]` or `[batch]`.
        """
        momentum = self.accumulate(grad, state, active)
        return self.update(weight, momentum, state, lr=lr, weight_decay=weight_decay, active=active)

    def step_many(
        self, stacks: Sequence[Stack], *, weight_decay: Rate = 0.0, active: Tensor | None = None
    ) -> list[Report]:
        """Step stacks of different shapes, which a rule may join; see `step`.

        The report of a trusted stack may be empty: nothing of it can be refused.
        """
        return [
            self.step(weight, grad, state, lr=lr, weight_decay=weight_decay, active=active)
            for weight, grad, state, lr, _ in stacks
        ]

    def sound_state(self, state: State) -> Tensor:
        """Return whether the state of each unit is finite, `[batch]`."""
        each = [value.flatten(1) if value.ndim > 1 else value[:, None] for value in state.values()]
        return torch.stack([value.isfinite().all(1) for value in each]).all(0)

    def figures(self, state: State) -> Report:
        """Compute what the report of the last step leaves out, `[batch]` each, from the state.

        It costs passes over memory, and is for steps on which somebody looks.
        """
        return {}

    @property
    def recreated(self) -> tuple[str, ...]:
        """Entries of the state, 0 at first, that a step makes good again.

        A saved state may lack them, as those of earlier versions do.
        """
        return ()

    def settings(self) -> dict[str, Any]:
        """Return the fields by name, with what acts in place of a null that stands for it."""
        return asdict(self)

    def radius_of(self, shape: tuple[int, int]) -> float | None:
        """Return the spectral norm to which the rule holds a `[rows, cols]` unit, None for none."""
        return None

    def scale_of(self, shape: tuple[int, int]) -> float | None:
        """Return the factor between learning rate and update of a `[rows, cols]` unit.

        The spectral norm of an update is `lr` times this. None for a rule without such a factor.
        """
        return None

    @property
    def solver_tolerance(self) -> float | None:
        """Tolerance of the multiplier solves of a step, None for a rule without them."""
        return None

    @property
    def sync_field(self) -> str | None:
        """Name of the field that, being True, makes a step wait for the device; None: none does."""
        return None

    @property
    def capturable(self) -> bool:
        """Whether a step can be recorded in a CUDA graph."""
        return self.sync_field is None

    def cost(self, shape: Sequence[int], *, product: Product = product_flops) -> float:
        """Count the FLOPs of one step on a unit of logical `shape`.

        `product` prices the matrix products; see `spectral.cost`.
        """
        elementwise = float(ELEMENTWISE_FLOPS * prod(shape))
        if not self.whole_matrix or len(shape) < 2:
            return elementwise
        short, long = sorted(shape)
        return elementwise + self.matrix_cost(short, long, product)

    def matrix_cost(self, short: int, long: int, product: Product) -> float:
        """Count the FLOPs of the products of a step on a matrix with sides `short <= long`.

        Every whole-matrix rule defines it; placement and plans rest on it.
        """
        raise NotImplementedError(f"rule {type(self).__name__} must define matrix_cost")


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_fraction(name: str, value: float) -> None:
    """Raise ValueError unless `0 <= value < 1`."""
    require(0.0 <= value < 1.0, f"{name} must be in [0, 1), got {value}")


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    require(value in choices, f"{name} must be one of {choices}, got {value!r}")


def require_matrices(weight: Tensor, rule: str) -> None:
    """Raise ValueError unless `weight` is a stack of matrices."""
    require(
        weight.ndim == 3,
        f"{rule} needs whole matrices [batch, rows, cols], got shape {tuple(weight.shape)}",
    )


def per_unit(rate: Rate, weight: Tensor) -> Rate:
    """Shape a rate to be multiplied with `weight` `[batch, ...]`, in at least float32.

    Numbers and 0-d tensors come back as they are. Raises ValueError for a tensor of another shape
    than `[]` or `[batch]`.
    """
    if not isinstance(rate, Tensor) or rate.ndim == 0:
        return rate
    require(
        rate.shape == weight.shape[:1],
        f"a rate must be a number or [batch] = {list(weight.shape[:1])}, got {list(rate.shape)}",
    )
    wide = torch.promote_types(weight.dtype, torch.float32)
    return rate.to(wide).view(-1, *(1,) * (weight.ndim - 1))


def units_of(rate: Rate, part: slice) -> Rate:
    """Return a rate of some units of a stack."""
    return rate[part] if isinstance(rate, Tensor) and rate.ndim else rate


def rate_of_stack(rates: Sequence[Rate], weight: Tensor) -> Rate:
    """Return the rate of a stack: one for all if its parameters have the same, else `[batch]`."""
    device = weight.device
    numbers = [rate for rate in rates if not isinstance(rate, Tensor)]
    if (
        all(rate is rates[0] for rate in rates)
        or len(numbers) == len(rates)
        and len({*numbers}) == 1
    ):
        return rates[0]
    if len(numbers) == len(rates):
        found = torch.tensor(numbers, dtype=torch.float64)
        # From pinned memory, so that the host does not wait.
        pinned = found.pin_memory() if device.type == "cuda" else found
        return pinned.to(device, non_blocking=True)
    wide = torch.promote_types(weight.dtype, torch.float32)
    tensors = [r if isinstance(r, Tensor) else weight.new_full((), r, dtype=wide) for r in rates]
    return torch.stack([tensor.to(device, wide) for tensor in tensors])


def rate_of_stacks(rates: Sequence[Rate], stacks: Sequence[Tensor]) -> Rate:
    """Return the rate of stacks with one each: one for all if they share it, else one per unit,
    `[sum of batches]`."""
    first = rates[0]
    if all(rate is first for rate in rates) and not (isinstance(first, Tensor) and first.ndim):
        return first
    each = zip(rates, stacks, strict=True)
    return together([per_matrix(rate, stack) for rate, stack in each])


def decay_(weight: Tensor, lr: Rate, weight_decay: Rate, active: Tensor | None) -> None:
    """Apply decoupled weight decay in place: `weight *= 1 - lr weight_decay`."""
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return
    # In the weight's dtype from the start: a float32 factor would round a float64 weight.
    factor = weight.new_ones(()) - per_unit(lr * weight_decay, weight)
    if active is not None:
        factor = torch.where(_broadcast(active, weight), factor, torch.ones_like(factor))
    weight.mul_(factor)


def subtract_(weight: Tensor, direction: Tensor, size: Rate, active: Tensor | None) -> None:
    """Subtract `size * direction` from `weight` in place where `active`; overwrites `direction`."""
    if active is not None:
        direction.masked_fill_(~_broadcast(active, direction), 0)
    if isinstance(size, Tensor):
        # A device scalar cannot be `alpha`; `direction` is ours to scale.
        weight.sub_(direction.mul_(per_unit(size, direction)))
    else:
        weight.sub_(direction, alpha=size)


def _broadcast(active: Tensor, x: Tensor) -> Tensor:
    """Shape a predicate, 0-d or `[batch]`, to broadcast over `x` `[batch, ...]`."""
    return active.view(-1, *(1,) * (x.ndim - 1)) if active.ndim else active


def unless_all(predicate: Tensor | None) -> Tensor | None:
    """Return `predicate`, or None where the host knows at no cost that all of it is True.

    That is so on a CPU, outside of a compiled graph. With None, passes over memory that only keep
    what they find are left out.
    """
    if predicate is None or predicate.device.type != "cpu" or torch.compiler.is_compiling():
        return predicate
    known = type(predicate) is Tensor  # a fake tensor, for one, has no value
    return None if known and bool(predicate.all()) else predicate


def taken(active: Tensor | None, sound: Tensor) -> Tensor:
    """Return whether each unit takes its step `[batch]`: it is `sound` and the step `active`."""
    return sound if active is None else sound & active


def refused(active: Tensor | None, sound: Tensor) -> Tensor:
    """Return 1 for each unit that is not `sound` `[batch]`, 0 for others and in inactive steps."""
    return (~sound if active is None else torch.gt(active, sound)).float()
