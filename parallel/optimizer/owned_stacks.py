"""What an owner keeps of the matrices it steps: stacks of units of equal shape, and their rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from models.units import Unit
from parallel.optimizer.exchange import Room, UnitTransfer
from parallel.optimizer.routing import Assignment, PCAssignment
from spectral.grouped import grouped
from spectral.rules.base import Rate, Report, Rule, Stack, State, Step
from spectral.stepping import Units


@dataclass(frozen=True)
class UnitRates:
    """Peak learning rate and weight decay of the units of a stack.

    Each is a number if all units have the same, else `[batch]`, float64, on the stack's device.
    """

    lr: Rate
    weight_decay: Rate

    @classmethod
    def of(cls, rates: Sequence[tuple[float, float]], device: torch.device) -> Self:
        """Collect the `(lr, weight_decay)` of each unit."""
        lr, weight_decay = zip(*rates, strict=True)
        return cls(_shared(lr, device), _shared(weight_decay, device))

    def at(self, factor: float | Tensor) -> tuple[Rate, Rate]:
        """Return the learning rate, multiplied by `factor`, and the weight decay.

        Tensors get the dtype of `factor`, so that a unit's rate does not depend on whether its
        stack has one rate or several.
        """
        lr, weight_decay = (_in_dtype(rate, factor) for rate in (self.lr, self.weight_decay))
        return lr * factor, weight_decay


def _shared(values: Sequence[float], device: torch.device) -> Rate:
    """Return the one value that all have, else all of them as a tensor."""
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _in_dtype(rate: Rate, factor: float | Tensor) -> Rate:
    if isinstance(rate, Tensor) and isinstance(factor, Tensor):
        return rate.to(factor.dtype)
    return rate


@dataclass
class OwnedStack:
    """Units of one shape and rule that this rank steps as one stack, a row of state each.

    Attributes:
        transfers: how each unit comes to this rank and goes back, in the order of the stack.
        assigned: what happens to each unit; they differ at most in what `owned_stacks` allows.
        rates: of the units.
        state: the rule's, `[batch, ...]` each.
        report: figures of the last step.
    """

    transfers: list[UnitTransfer]
    assigned: list[Assignment]
    rates: UnitRates
    state: State
    report: Report = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """The units, in the order of the stack."""
        return [transfer.unit for transfer in self.transfers]

    @property
    def rule(self) -> Rule:
        """The rule of all units."""
        return self.assigned[0].rule

    @property
    def pc(self) -> PCAssignment | None:
        """How the weights become effective weights: all but the rate of gamma, which may differ."""
        return self.assigned[0].pc

    def tensors(self) -> list[Tensor]:
        """List all memory that outlives a step."""
        return list(self.state.values())

    def saved(self) -> Iterator[tuple[str, UnitTransfer, Tensor]]:
        """Yield key, transfer and value, a view, of everything that a checkpoint holds of it."""
        for i, transfer in enumerate(self.transfers):
            for name, value in self.state.items():
                yield f"optimizer/{transfer.unit.name}/{name}", transfer, value[i]


def owned_stacks(
    transfers: Sequence[UnitTransfer],
    assign: Callable[[Unit], Assignment],
    device: torch.device,
) -> list[OwnedStack]:
    """Group the transfers into stacks, whose state is still empty.

    Units share a stack if they agree in shape, rule, and how their weights become effective ones;
    learning rate, weight decay and everything else may differ.
    """

    def kind(transfer: UnitTransfer) -> tuple[object, ...]:
        assigned = assign(transfer.unit)
        pc = assigned.pc
        shared = None if pc is None else (pc.preconditioner, pc.gamma_rule)
        return transfer.unit.shape, assigned.rule, shared

    stacks = []
    for mine in grouped(transfers, kind).values():
        assignments = [assign(transfer.unit) for transfer in mine]
        rates = UnitRates.of([(each.lr, each.weight_decay) for each in assignments], device)
        stacks.append(OwnedStack(mine, assignments, rates, {}))
    return stacks


def stepped_units(
    owned: OwnedStack,
    momenta: Room,
    weights: Room,
    rates: tuple[Rate, Rate],
    active: Tensor,
) -> Units:
    """Return a stack to be stepped from `momenta`; changes take the place of `weights`.

    `rates` are learning rate and weight decay of the units at this step.
    """
    transfers = owned.transfers
    whole = Step(*rates, active)

    def take(part: slice) -> Stack:
        weight = weights.assembled(transfers, part).clone()
        momentum = momenta.assembled(transfers, part).to(weight.dtype)
        state = {name: value[part] for name, value in owned.state.items()}
        return Stack(weight, momentum, state, whole.of(part))

    def put(part: slice, stack: Stack, report: Report) -> None:
        old = weights.assembled(transfers, part)
        change = torch.sub(stack.weight, old, out=old)
        weights.set_(transfers, part, change)

    return Units(owned.units[0].shape, weights.dtype, weights.device, len(transfers), take, put)


def rates_at(stacks: Sequence[OwnedStack], factor: float | Tensor) -> list[tuple[Rate, Rate]]:
    """Return `UnitRates.at` of each stack, the same tensor for equal peaks."""
    found: dict[object, tuple[Rate, Rate]] = {}
    rates = []
    for stack in stacks:
        peak = stack.rates.lr, stack.rates.weight_decay
        key = id(stack) if any(isinstance(each, Tensor) for each in peak) else peak
        if key not in found:
            found[key] = stack.rates.at(factor)
        rates.append(found[key])
    return rates
