"""Interface of update rules: batched updates of stacked parameters and their state.

The single-process and distributed optimizers call the same rules through `spectral.stepping`, so
the mathematics is written only once. Routing, planning and monitoring only use a rule's methods.
`RULES` maps the names used in configs and optimizers to rule classes.
"""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import cache
from math import prod
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from ..batching import concat

ELEMENTWISE_FLOPS = 16
"""FLOPs per element for momentum, decay, update and norms; accurate to a factor of 1.5 for AdamW.
"""

State = dict[str, Tensor]
Report = dict[str, Tensor]
Rate = float | Tensor
"""A learning rate or weight decay: a number or a 0-d tensor."""


class Step(NamedTuple):
    """The arguments of a step.

    Attributes:
        lr, weight_decay: learning rate and weight decay for all units.
        active: 0-d bool tensor. If False, weight and state are left bitwise unchanged, without a
            host sync. None means the step is always taken.
    """

    lr: Rate
    weight_decay: Rate = 0.0
    active: Tensor | None = None

    @property
    def rates(self) -> tuple[object, object]:
        """A key that is equal for steps with equal rates, computed without reading tensors."""
        return rate_key(self.lr), rate_key(self.weight_decay)


class Stack(NamedTuple):
    """Units of the same shape that a rule updates together.

    Attributes:
        weight: `[batch, ...]`, one entry per unit.
        grad: the gradient, or the result of `Rule.accumulate`; may be overwritten.
        state: the rule's state.
        step: rates and active flag.
    """

    weight: Tensor
    grad: Tensor
    state: State
    step: Step


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """An update rule. Its fields are the hyper-parameters and the keys of its config section."""

    whole_matrix: ClassVar[bool]
    """Whether the rule needs whole matrices `[batch, rows, cols]`; otherwise it is elementwise."""
    reads_weight: ClassVar[bool] = True
    """Whether a step uses the weight for anything besides decaying it and subtracting the update.
    """
    elementwise_state: ClassVar[tuple[str, ...]] = ()
    """State entries that `accumulate` uses; the entries have the weight's shape and start at 0."""

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError for invalid fields. Subclasses must call this method."""
        check_fields(type(self), vars(self))

    @property
    def cautious(self) -> bool:
        """Whether weight decay only applies to entries that the update shrinks."""
        return False

    @property
    def waiting_field(self) -> str | None:
        """The field that causes a host sync in each step, or None if steps can be captured."""
        return None

    @property
    def undoes_decay(self) -> bool:
        """Whether weight decay has no effect."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether each step, including the first, rescales weights to the radius."""
        return False

    def decay_problem(self, weight_decay: float) -> str | None:
        """Return the reason why this weight decay cannot be used with the rule, or None."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return the fields by name, with nulls replaced by the values in effect."""
        return asdict(self)

    @abstractmethod
    def init_state(self, weight: Tensor) -> State:
        """Create the state for `weight` `[batch, ...]`.

        Every tensor has a leading batch dimension. Keys must be the same for every weight and at
        every step.
        """

    def accumulate(
        self, grads: Sequence[Tensor], states: Sequence[State], active: Tensor | None
    ) -> list[Tensor]:
        """Compute the inputs to `update` from `grads`, in place. By default, return `grads` itself.

        The computation is elementwise, so it may run on any slice of a matrix. `accumulate` only
        accesses the state entries listed in `elementwise_state`.
        """
        return list(grads)

    @abstractmethod
    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Update weights and states in place, given the result of `accumulate`.

        `accumulate` and `update` are called under `torch.no_grad()`.

        Returns a report per stack, with metrics `[batch]`. Rules that compute their direction from
        norms report `refused`: 1 for each unit whose step is not sound. The weight of a refused
        unit is left bitwise unchanged, so finite weights stay finite for any `grad` and state.
        Elementwise rules may assume finite gradients, because the optimizer checks them.

        All stacks have the same dtype, device and active flag. On devices with kernels, a
        whole-matrix rule may receive stacks of several shapes whose shorter sides have the same
        length; on other devices, it receives a single stack.
        """

    def cost(self, shape: Sequence[int]) -> float:
        """Return the FLOPs of one step on a unit of logical `shape`, for placement and plans.

        By default, only elementwise passes are counted; see `costs_are_counted`.
        """
        return float(ELEMENTWISE_FLOPS * prod(shape))

    @classmethod
    def costs_are_counted(cls) -> bool:
        """Return whether `cost` counts all FLOPs. `Rule.cost` undercounts whole-matrix rules."""
        return not cls.whole_matrix or cls.cost is not Rule.cost

    def radius_of(self, shape: Sequence[int]) -> float | None:
        """Return the spectral norm that the rule enforces on a `[rows, cols]` unit, if any."""
        return None

    def scale_of(self, shape: Sequence[int]) -> float | None:
        """Return the spectral norm of a `[rows, cols]` unit's update divided by lr, or None if this
        ratio is not constant.
        """
        return None


@torch.no_grad()
def take_step(
    rule: Rule,
    weight: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Rate,
    weight_decay: Rate = 0.0,
    active: Tensor | None = None,
) -> Report:
    """Update a stack in place with `rule`, and return its report. See `Stack` for the arguments.

    Raises ValueError for a rate that is a tensor but not 0-d.
    """
    check_rate("lr", lr)
    check_rate("weight_decay", weight_decay)
    (momentum,) = rule.accumulate([grad], [state], active)
    (report,) = rule.update([Stack(weight, momentum, state, Step(lr, weight_decay, active))])
    return report


def check_rate(name: str, rate: Rate) -> None:
    """Raise ValueError for a rate that is a tensor but not 0-d."""
    if isinstance(rate, Tensor) and rate.ndim:
        raise ValueError(f"{name} must be a number or a 0-d tensor, got shape {tuple(rate.shape)}")


def check_fields(kind: type[Rule], values: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for a value that violates its field's annotation."""
    for field, annotation in _annotations(kind):
        value = values.get(field.name, field.default)
        if value is not field.default:
            check_value(field.name, annotation, value)


def class_problems(kind: type[Rule]) -> Iterator[str]:
    """Yield each requirement that a rule class violates, such as "must be a ..."."""
    if abstract := kind.__abstractmethods__:
        yield f"must implement the method {sorted(abstract)[0]}"
    if "__dataclass_fields__" not in vars(kind):
        yield "must be a dataclass: @dataclass(frozen=True, kw_only=True)"
    if "whole_matrix" not in dir(kind):
        yield "must define whole_matrix (True if the rule requires whole matrices, else False)"
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING:
            yield f"must define a default for its field {field.name}"
    weight = torch.zeros(2, 3, 4, device="cpu")
    state = kind().init_state(weight)
    shapes = dict.fromkeys(state, weight.shape[:1]) | dict.fromkeys(
        kind.elementwise_state, weight.shape
    )
    for name, shape in shapes.items():
        if name not in state or state[name].shape[: len(shape)] != shape:
            got = tuple(state[name].shape) if name in state else "none"
            yield (
                f"must create the state {name} with a shape that starts with {[*shape]} for a "
                f"weight of shape [2, 3, 4], got {got}"
            )


@cache
def _annotations(kind: type[Rule]) -> list[tuple[Field[Any], Any]]:
    try:
        hints = get_type_hints(kind)
    except NameError:  # names imported only for type checking
        return []
    return [(field, hints[field.name]) for field in fields(kind)]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` is true."""
    if not condition:
        raise ValueError(message)


def require_fraction(name: str, value: float) -> None:
    """Raise ValueError unless `0 <= value < 1`."""
    require(0.0 <= value < 1.0, f"{name} must be in [0, 1), got {value}")


def rate_key(rate: Rate) -> object:
    """Return a key that is equal for equal rates: the number, or the tensor's id."""
    return id(rate) if isinstance(rate, Tensor) else rate


def rate_of_stacks(rates: Sequence[Rate], stacks: Sequence[Tensor]) -> Rate:
    """Return the rate of all stacks or, if rates differ, one rate per unit `[sum of batches]`."""
    if len(set(map(rate_key, rates))) == 1:
        return rates[0]
    pairs = zip(stacks, rates, strict=True)
    return concat([w.new_empty(len(w)).fill_(rate) for w, rate in pairs])


def decay_(
    weight: Tensor,
    lr: Rate,
    weight_decay: Rate,
    active: Tensor | None,
    direction: Tensor | None = None,
) -> None:
    """Apply decoupled weight decay in place: `weight *= 1 - lr weight_decay`.

    If the update's `direction` is given, entries where weight and direction have opposite signs are
    not decayed.
    """
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return
    # Compute in the weight's dtype: a float32 factor would round a float64 weight.
    factor = weight.new_ones(()) - lr * weight_decay
    if active is not None:
        factor = torch.where(_broadcast(active, weight), factor, torch.ones_like(factor))
    if direction is not None:
        factor = torch.where(weight.sign() * direction < 0, torch.ones_like(factor), factor)
    weight.mul_(factor)


def subtract_(weight: Tensor, direction: Tensor, size: Rate, active: Tensor | None) -> None:
    """Subtract `size * direction` from `weight` where `active`. Modifies both in place."""
    if active is not None:
        direction.masked_fill_(~_broadcast(active, direction), 0)
    if isinstance(size, Tensor):
        # `alpha` cannot be a device scalar; `direction` may be overwritten.
        weight.sub_(direction.mul_(size))
    else:
        weight.sub_(direction, alpha=size)


def _broadcast(active: Tensor, x: Tensor) -> Tensor:
    """Reshape an active flag, 0-d or `[batch]`, to broadcast over `x` `[batch, ...]`."""
    return active.view(-1, *(1,) * (x.ndim - 1)) if active.ndim else active


def store_(old: Tensor, new: Tensor, active: Tensor | None) -> None:
    """Overwrite `old` `[batch, ...]` with `new` where `active` (0-d or `[batch]`)."""
    if active is None:
        old.copy_(new)
    else:
        torch.where(_broadcast(active, old), new.to(old.dtype), old, out=old)


def taken(active: Tensor | None, sound: Tensor) -> Tensor:
    """Return `[batch]`: True for units that are `sound` in an active step, else False."""
    return sound if active is None else sound & active


def refused(active: Tensor | None, sound: Tensor) -> Tensor:
    """Return `[batch]`: 1 for units that are not `sound` in an active step, else 0."""
    return (~sound if active is None else torch.gt(active, sound)).float()


WORDS: Final[dict[Any, str]] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    torch.dtype: "a torch.dtype",
    Tensor: "a 0-d tensor",
    NoneType: "None",
}
"""Type names used in error messages."""


def check_value(name: str, annotation: Any, value: object) -> None:
    """Raise TypeError for a wrong type, and ValueError for a wrong literal or a nonfinite number.

    Bools do not count as numbers, and floats do not count as integers. Types not in `WORDS` are not
    checked.
    """
    types, literals = _accepted(annotation)
    if literals:
        require_choice(name, value, literals)
    elif not _fits(value, types):
        accepted = " or ".join(WORDS[kind] for kind in types)
        dtypes = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
        hint = nearest(value, dtypes if torch.dtype in types else ())
        raise TypeError(f"{name} must be {accepted}, got {value!r}{hint}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


@cache
def _accepted(annotation: Any) -> tuple[tuple[Any, ...], tuple[object, ...]]:
    """Return the types in a union. If all are literals or None, also return their values."""
    joined = get_origin(annotation) in (Union, UnionType)
    types = get_args(annotation) if joined else (annotation,)
    literals = [x for kind in types if get_origin(kind) is Literal for x in get_args(kind)]
    if not all(kind is NoneType or get_origin(kind) is Literal for kind in types):
        return types, ()
    return types, (*literals, None) if NoneType in types else tuple(literals)


def _fits(value: object, types: tuple[Any, ...]) -> bool:
    if type(value) in types or not WORDS.keys() >= {*types}:
        return True
    wider = ((float, Real), (int, Integral), (str, str), (Tensor, Tensor))
    like = any(kind in types and isinstance(value, bases) for kind, bases in wider)
    return like and not isinstance(value, bool)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError if `value` is not one of `choices`, suggesting the closest choice."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}{nearest(value, choices)}")


def nearest(name: object, known: Iterable[object], *, similarity: float = 0.6) -> str:
    """Return a message suffix that suggests the closest name, or "" if none is close.

    `similarity` is the minimum `difflib.SequenceMatcher` ratio of a close name.
    """
    names = {str(x): x for x in known}
    close = difflib.get_close_matches(str(name), [*names], n=1, cutoff=similarity)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
