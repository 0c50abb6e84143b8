"""What an owner keeps of the matrices it steps, in stacks of equal shape."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.units import Unit
from parallel.optimizer.exchange import UnitTransfer
from parallel.optimizer.routing import Assignment
from spectral.kernels.dispatch import device_name, fused_update
from spectral.msign_route import msign_route, precondition_route, update_route
from spectral.rules.base import DTYPES, Report, Rule, State
from spectral.rules.muon import MuonRule


@dataclass
class OwnedStack:
    """Units of one shape and assignment that this rank steps as one stack, a row of state each."""

    transfers: list[UnitTransfer]
    assigned: Assignment
    state: State
    report: Report = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """The units, in the order of the stack."""
        return [transfer.unit for transfer in self.transfers]

    def msign_route(self, weight: torch.dtype, device: torch.device) -> str | None:
        """The way that the products of msign, the update and the products of PC(W) go for weights
        of this dtype, None if there is none of them."""
        ways = [self._msign_route(weight, device)]
        if self.assigned.precondition is not None:
            rows, cols = self.units[0].shape
            name = device_name(device)
            pc = precondition_route(len(self.transfers), rows, cols, dtype=weight, name=name)
            ways.append(f"pc: {pc}")
        return "; ".join(way for way in ways if way is not None) or None

    def _msign_route(self, weight: torch.dtype, device: torch.device) -> str | None:
        # Of a switched rule, the one with msign.
        rule: Any = getattr(self.assigned.rule, "spectral", self.assigned.rule)
        if not hasattr(rule, "msign_dtype"):
            return None
        rows, cols = self.units[0].shape
        dtype = weight if rule.msign_dtype is None else DTYPES[rule.msign_dtype]
        products = msign_route(
            len(self.transfers),
            rows,
            cols,
            steps=getattr(rule, "steps", 1),
            schedule=getattr(rule, "schedule", "polar_express"),
            dtype=dtype,
            device=device,
            name=device_name(device),
        )
        if not isinstance(rule, MuonRule):
            return products
        why = fused_update(weight, device_name(device))
        update = "kernel" if why is None else f"library ({why})"
        if rule.ends_in_product and weight == torch.float32:
            size = (len(self.transfers), rows, cols)
            found = update_route(*size, dtype=dtype, device=device, name=device_name(device))
            update = update if found is None else found
        return f"{products}; update: {update}"

    def tensors(self) -> list[Tensor]:
        """All memory that outlives a step."""
        return list(self.state.values())

    def saved(self) -> Iterator[tuple[str, UnitTransfer, Tensor]]:
        """Key, transfer and value of everything a checkpoint holds of it, views."""
        for i, transfer in enumerate(self.transfers):
            for name, value in self.state.items():
                yield f"optimizer/{transfer.unit.name}/{name}", transfer, value[i]


def owned_stacks(
    transfers: Sequence[UnitTransfer], assign: Callable[[Unit], Assignment]
) -> list[OwnedStack]:
    """The transfers in batches that a rule can step as one stack, state still empty."""
    found: dict[tuple[Assignment, tuple[int, ...]], list[UnitTransfer]] = {}
    for transfer in transfers:
        key = (assign(transfer.unit), transfer.unit.shape)
        found.setdefault(key, []).append(transfer)
    return [OwnedStack(mine, assigned, {}) for (assigned, _), mine in found.items()]


def accumulated(rule: Rule, gradient: Tensor, state: State, active: Tensor) -> Tensor:
    """What `rule.accumulate` makes of a gradient, float32 or wider.

    What of the state, or the gradient, is kept in 16 bits is widened for the mean; the state is
    rounded after it.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    mean = {name: state[name].to(dtype) for name in rule.elementwise_state}
    result = rule.accumulate(gradient.to(dtype), mean, active)
    for name, wide in mean.items():
        if state[name].dtype != dtype:
            state[name].copy_(wide)
    return result
