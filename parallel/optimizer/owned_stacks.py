"""Stacks of owned units that share a shape and rates, and the state and memory of these stacks.

Independent stacks can be updated on parallel GPU streams.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
from torch import Tensor

from models.units import ALL, Unit
from parallel.optimizer.routing import Assignment
from parallel.optimizer.unit_transfer import UnitTransfer
from parallel.storage.domain_model import DomainModel
from spectral.batching import grouped
from spectral.rules.base import Report, Rule, Stack, State, Step
from spectral.sharded.exchange import Exchange
from spectral.stepping import Units

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Number of step groups, and dtypes for communication and storage.

    step_groups      maximum number of bucket groups; None: see `BucketLayout.step_groups`
    exchange_dtype   dtype in which momentum and updates are sent; None: no conversion
    momentum_dtype   momentum dtype for whole-matrix rules; None: dtype of the master weights
    """

    step_groups: int | None = None
    exchange_dtype: torch.dtype | None = None
    momentum_dtype: torch.dtype | None = None


STREAMS: Final = 4

LARGE: Final = 1 << 21
"""Number of elements at which a single stack saturates a GPU: 128 tiles of 128 x 128."""


class Streams:
    """CUDA streams for independent work.

    Small stacks of small matrices leave most of a GPU idle, so they are spread over several
    streams. The streams fork from the current stream and join it at the end, so that the work can
    be captured as a CUDA graph. Large stacks stay on the current stream: they would be no faster on
    another one, and PyTorch's allocator would keep a separate scratch pool for each stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [
            torch.cuda.Stream(device) for _ in range(STREAMS if device.type == "cuda" else 0)
        ]

    def spread(self, items: Sequence[Item], elements: Callable[[Item], int]) -> Iterator[Item]:
        """Assign the items to streams, and yield them one by one.

        The stream of an item is the current stream until the next item is requested. `elements`
        returns the number of matrix elements in an item. At the end, the original stream waits for
        all items.
        """
        if not self.streams or len(items) < 2:
            yield from items
            return
        current = torch.cuda.current_stream()
        began = current.record_event()
        used = 0
        for item in items:
            if elements(item) >= LARGE:
                yield item
                continue
            stream = self.streams[used % len(self.streams)]
            used += 1
            stream.wait_event(began)
            with torch.cuda.stream(stream):
                yield item
        # A stream without items is not part of a graph capture, and the capture must not wait for
        # it.
        for stream in self.streams[:used]:
            current.wait_stream(stream)


class StackMemory:
    """Memory for the pieces of units, allocated as one block per stack.

    Attributes:
        pieces: views `[elements]` of the blocks, one for each unit, by unit name.
    """

    def __init__(
        self, stacks: Iterable[Sequence[UnitTransfer]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate memory for the units of `stacks`. All units of a stack have the same shape."""
        self.dtype, self.device = dtype, device
        self.pieces: dict[str, Tensor] = {}
        self._blocks: dict[str, Tensor] = {}  # by name of the stack's first unit
        for transfers in stacks:
            block = torch.empty(len(transfers), transfers[0].unit.numel, dtype=dtype, device=device)
            self._blocks[transfers[0].unit.name] = block
            names = [transfer.unit.name for transfer in transfers]
            self.pieces |= zip(names, block, strict=True)

    def assembled(self, transfers: Sequence[UnitTransfer], part: slice = ALL) -> Tensor:
        """Return the matrices `[units, rows, cols]` of a stack. The result is a view if all
        `transfers` are `in_order`."""
        if all(transfer.in_order for transfer in transfers):
            first = transfers[0].unit
            return self._blocks[first.name].view(len(transfers), *first.shape)[part]
        return torch.stack([t.whole(self.pieces[t.unit.name]) for t in transfers[part]])


def cut_all_(
    transfers: Sequence[UnitTransfer], stack: Tensor, pieces: Mapping[str, Tensor]
) -> None:
    """Copy each matrix of `stack` `[units, rows, cols]` to `pieces[unit name]`."""
    for transfer, whole in zip(transfers, stack, strict=True):
        transfer.cut_(whole, pieces[transfer.unit.name])


@dataclass
class OwnedStack:
    """Units with the same shape and rule, which this rank updates as one stack.

    Attributes:
        transfers: transfers of the units, in stack order.
        assigned: assignment of the first unit; the other assignments may only differ in the
            penalty.
        state: the rule's state, tensors `[batch, ...]`.
        report: metrics of the last step.
    """

    transfers: list[UnitTransfer]
    assigned: Assignment
    state: State
    report: Report = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """The units, in stack order."""
        return [transfer.unit for transfer in self.transfers]

    @property
    def rule(self) -> Rule:
        """The rule of all units."""
        return self.assigned.rule

    def tensors(self) -> list[Tensor]:
        """Return all tensors that persist between steps."""
        return list(self.state.values())

    def saved(self) -> Iterator[tuple[str, UnitTransfer, Tensor]]:
        """Yield (key, transfer, value) for every tensor saved in a checkpoint. Values are views."""
        for i, transfer in enumerate(self.transfers):
            for name, value in self.state.items():
                yield f"optimizer/{transfer.unit.name}/{name}", transfer, value[i]


def owned_stacks(
    transfers: Sequence[UnitTransfer], assign: Callable[[Unit], Assignment]
) -> list[OwnedStack]:
    """Group the transfers into stacks with empty state.

    All units of a stack share a shape, a rule, rates, and the map to effective weights.
    """

    def kind(transfer: UnitTransfer) -> tuple[object, ...]:
        assigned = assign(transfer.unit)
        rates = assigned.lr, assigned.weight_decay
        return transfer.unit.shape, assigned.rule, rates, assigned.pc

    return [
        OwnedStack(members, assign(members[0].unit), {})
        for members in grouped(transfers, kind).values()
    ]


def gathered_weights(
    stacks: Sequence[OwnedStack], exchange: Exchange, model: DomainModel
) -> StackMemory:
    """Gather the weights of stacks from the master shards. All ranks of the stage must call this
    function."""
    master = model.master
    weights = StackMemory([stack.transfers for stack in stacks], master.dtype, master.device)
    exchange.gather(model.masters, weights.pieces, master)
    return weights


class SteppedStack(Units):
    """A stack whose `weights` are updated in place using `momenta`."""

    def __init__(
        self, owned: OwnedStack, momenta: StackMemory, weights: StackMemory, step: Step
    ) -> None:
        shape, count = owned.units[0].shape, len(owned.transfers)
        super().__init__(shape, weights.dtype, weights.device, count)
        self.owned, self.momenta, self.weights, self.step = owned, momenta, weights, step

    def take(self, part: slice) -> Stack:
        """Return the matrices, assembled from their pieces."""
        transfers = self.owned.transfers
        weight = self.weights.assembled(transfers, part)
        momentum = self.momenta.assembled(transfers, part).to(weight.dtype)
        state = {name: value[part] for name, value in self.owned.state.items()}
        return Stack(weight, momentum, state, self.step)

    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """Copy the new weights to their pieces, unless the stack is a view of the pieces."""
        transfers = self.owned.transfers
        if not all(transfer.in_order for transfer in transfers):
            cut_all_(transfers[part], stack.weight, self.weights.pieces)
