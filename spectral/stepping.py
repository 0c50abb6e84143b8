"""Steps of many units: grouped by shape, cut to fit the workspace, stepped by a rule and written
back.

Every optimizer steps its units here: the one-process library, its sharded matrices, the distributed
optimizer and its PC layers. Only `Units`, the source and target of the units, differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from .batching import copy_all_
from .kernels.dispatch import device_name, listed
from .polar import workspace, workspace_units
from .rules.base import Report, Rule, Stack, State

Batch = list[tuple[int, slice]]
"""The units of one call of a rule, by the index of their group."""


class Units(ABC):
    """Units of one shape and dtype on one device.

    Attributes:
        shape: shape of each unit.
        dtype, device: dtype and device of their weights.
        count: number of units.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, count: int
    ) -> None:
        self.shape, self.dtype, self.device, self.count = shape, dtype, device, count

    @abstractmethod
    def take(self, part: slice) -> Stack:
        """Return some of the units as a stack."""

    @abstractmethod
    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """Store the stack after its step, with the rule's report."""


def step_units(
    rule: Rule,
    groups: Sequence[Units],
    *,
    spread: Callable[[Sequence[Batch]], Iterable[Batch]] = iter,
) -> list[Report]:
    """Step groups of units by a rule; return each group's report, `[units]` per figure.

    The gradients must be results of `accumulate_`. `spread` yields the independent batches, for
    instance on separate streams. Call it under `torch.no_grad()`.
    """
    reports: list[list[Report]] = [[] for _ in groups]
    for batch in spread(batches(rule, groups)):
        stacks = [groups[i].take(part) for i, part in batch]
        updated = rule.update(stacks)
        if not (isinstance(updated, list) and len(updated) == len(stacks)):
            raise TypeError(
                f"update of {type(rule).__name__} must return a list of {len(stacks)} reports, one "
                f"per stack, got {type(updated).__name__}"
            )
        for (i, part), stack, report in zip(batch, stacks, updated, strict=True):
            groups[i].put(part, stack, report)
            reports[i].append(report)
        del stacks, stack  # before the next batch is stacked
    return [joined(parts) for parts in reports]


def batches(rule: Rule, groups: Sequence[Units]) -> list[Batch]:
    """Choose the units of each call.

    An elementwise rule takes all of one dtype and device. A rule of matrices takes as many units of
    one shape as fit the workspace; on a device with kernels, also units of other shapes with the
    same shorter side, which share work.
    """
    planned: list[Batch] = []
    open_: dict[object, tuple[Batch, int]] = {}
    for i, units in enumerate(groups):
        numel, limit = prod(units.shape), workspace(units.device)
        size = workspace_units(numel, units.device) if rule.whole_matrix else units.count
        key = units.dtype, units.device, rule.whole_matrix and min(units.shape)
        joins = not rule.whole_matrix or listed(device_name(units.device))
        for first in range(0, units.count, max(1, size)):
            part = slice(first, min(first + size, units.count))
            count = numel * (part.stop - part.start)
            batch, before = open_.get(key, ([], 0)) if joins else ([], 0)
            if rule.whole_matrix and before + count > limit:
                batch, before = [], 0
            if not batch:
                planned.append(batch)
            batch.append((i, part))
            open_[key] = batch, before + count
    return planned


def elements_of(groups: Sequence[Units], batch: Batch) -> int:
    """Return the number of elements of the units of a batch, which are parts of `groups`."""
    return sum(prod(groups[i].shape) * (part.stop - part.start) for i, part in batch)


def accumulate_(
    rule: Rule,
    grads: Sequence[Tensor],
    states: Sequence[State],
    active: Tensor | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace gradients by the result of `rule.accumulate`, computed in `dtype` or in their dtype.

    Gradients and state of another dtype are rounded afterwards.
    """
    dtype = grads[0].dtype if dtype is None else dtype
    wide = [grad.to(dtype) for grad in grads]
    means = [{name: state[name].to(dtype) for name in rule.elementwise_state} for state in states]
    results = rule.accumulate(wide, means, active)
    pairs = [*zip(grads, results, strict=True)]
    for state, mean in zip(states, means, strict=True):
        pairs += [(state[name], value) for name, value in mean.items()]
    copy_all_((kept, value) for kept, value in pairs if kept.dtype != value.dtype)


def joined(reports: Sequence[Report]) -> Report:
    """Concatenate the reports of parts of a group."""
    if len(reports) == 1:
        return reports[0]
    names = reports[0] if reports else ()
    return {name: torch.cat([report[name] for report in reports]) for name in names}
