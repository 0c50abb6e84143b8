"""What an owner keeps of the matrices it steps: stacks of units of equal shape and rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from models.units import Unit
from parallel.optimizer.exchange import StackMemory, UnitTransfer
from parallel.optimizer.routing import Assignment
from parallel.storage.domain_model import Buffers
from spectral.batching import grouped
from spectral.rules.base import Report, Rule, Stack, State, Step
from spectral.sharded.exchange import Exchange
from spectral.stepping import Units


@dataclass
class OwnedStack:
    """Units of one shape and rule that this rank steps as one stack, a row of state each.

    Attributes:
        transfers: how each unit comes to this rank and goes back, in the order of the stack.
        assigned: what happens to the first unit; others differ at most in their penalty.
        state: the rule's, `[batch, ...]` each.
        report: figures of the last step.
    """

    transfers: list[UnitTransfer]
    assigned: Assignment
    state: State
    report: Report = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """The units, in the order of the stack."""
        return [transfer.unit for transfer in self.transfers]

    @property
    def rule(self) -> Rule:
        """The rule of all units."""
        return self.assigned.rule

    def tensors(self) -> list[Tensor]:
        """List all memory that outlives a step."""
        return list(self.state.values())

    def saved(self) -> Iterator[tuple[str, UnitTransfer, Tensor]]:
        """Yield key, transfer and value, a view, of everything that a checkpoint holds of it."""
        for i, transfer in enumerate(self.transfers):
            for name, value in self.state.items():
                yield f"optimizer/{transfer.unit.name}/{name}", transfer, value[i]


def owned_stacks(
    transfers: Sequence[UnitTransfer], assign: Callable[[Unit], Assignment]
) -> list[OwnedStack]:
    """Group the transfers into stacks, whose state is still empty.

    Units share a stack if they agree in shape, rule, rates, and how their weights become effective
    ones.
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
    stacks: Sequence[OwnedStack], exchange: Exchange, buffers: Buffers
) -> StackMemory:
    """Gather the weights of stacks from the masters' shards; all ranks of the stage call it."""
    master = buffers.master
    weights = StackMemory([stack.transfers for stack in stacks], master.dtype, master.device)
    exchange.gather(buffers.masters, weights.pieces, master)
    return weights


def stepped_units(
    owned: OwnedStack, momenta: StackMemory, weights: StackMemory, step: Step
) -> Units:
    """Return a stack to be stepped from `momenta`, in `weights`."""
    transfers = owned.transfers

    def take(part: slice) -> Stack:
        weight = weights.assembled(transfers, part)
        momentum = momenta.assembled(transfers, part).to(weight.dtype)
        state = {name: value[part] for name, value in owned.state.items()}
        return Stack(weight, momentum, state, step)

    def put(part: slice, stack: Stack, report: Report) -> None:
        weights.write(transfers, part, stack.weight)

    return Units(owned.units[0].shape, weights.dtype, weights.device, len(transfers), take, put)
