"""The competitors in scripts/bench/optimizer.py: our rules, PyTorch's optimizers, the public SSO
and the slow reference, each on the units of one rank."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from models.units import Unit
from parallel.optimizer.exchange import UnitTransfer
from parallel.optimizer.materialized_pc import MaterializedStack, materialized_stack, step_whole
from parallel.optimizer.owned_stacks import OwnedStack, UnitRates, owned_stacks
from parallel.optimizer.routing import Assign, Assignment
from scripts.bench import slow_reference
from spectral.power_iteration import cold_start
from spectral.rules.base import Rule, State

BETA, TOLERANCE = 0.95, 2e-4
ALIGNMENT = 0.6
"""Times min(shape)^-1/2: the gradient's part along the weight's top singular pair Theta, with which
the solver meets |f(0)| = 0.5 as in training. Unaligned gradients flatter every solver."""


class Side(Protocol):
    """One competitor."""

    def prepare(self) -> None:
        """Restore what a step consumes; not timed."""

    def step(self) -> None:
        """Update all weights once."""


@dataclass(frozen=True)
class Share:
    """The units that one of `ranks` ranks steps: whole matrices, and a part of each elementwise
    unit."""

    matrices: list[Unit]
    elementwise: list[Unit]
    ranks: int

    def part(self, unit: Unit) -> int:
        """The rank's number of elements of an elementwise unit."""
        return -(-unit.numel // self.ranks)


def matrices(units: Sequence[Unit], assign: Assign) -> list[Unit]:
    """The units that the recipe assigns to a whole-matrix rule."""
    return [unit for unit in units if assign(unit).has_owner]


def aligned(count: int, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights of spectral norm sqrt(rows / cols) and gradients, `[count, rows, cols]`, aligned as
    in training."""
    rows, cols = shape
    weight = torch.randn(count, rows, cols, device=device)
    sigma, u, v = cold_start(weight)
    weight *= (rows / cols) ** 0.5 / sigma[:, None, None]
    gradient = torch.randn_like(weight).div_((rows * cols) ** 0.5)
    gradient += ALIGNMENT / min(rows, cols) ** 0.5 * u[:, :, None] * v[:, None]
    return weight, gradient


@dataclass
class Stack:
    """Units of one shape and rule. A step consumes `gradient`, which `kept` restores."""

    rule: Rule
    rates: UnitRates
    weight: Tensor
    kept: Tensor
    gradient: Tensor
    state: State
    parameter: Tensor  # bfloat16, what the model multiplies by

    def step(self, factor: Tensor, active: Tensor) -> None:
        """Take the rule's step and round it to the model's weights."""
        step_whole(
            self.rule, self.rates, self.weight, self.gradient, self.state, factor, active,
            trusted=True,
        )  # fmt: skip
        self.parameter.copy_(self.weight)


@dataclass
class PCStack:
    """Preconditioned units of one shape and rule."""

    batch: MaterializedStack
    kept: Tensor
    gradient: Tensor
    parameter: Tensor

    def step(self, factor: Tensor, active: Tensor) -> None:
        """Turn the gradient of PC(W) into that of W, take the rule's step and compute PC(W)."""
        names = [unit.name for unit in self.batch.units]
        pieces = dict(zip(names, self.gradient.flatten(1)[:, None], strict=True))
        self.batch.pull_back_(pieces)
        self.batch.step(pieces, factor, active)
        for target, (_, effective) in zip(self.parameter, self.batch.effective(), strict=True):
            target.copy_(effective)


def new_stack(batch: OwnedStack, device: torch.device) -> Stack | PCStack:
    """A stack with random weights and gradients."""
    weight, kept = aligned(len(batch.transfers), batch.units[0].shape, device)
    parameter, gradient = torch.empty_like(weight, dtype=torch.bfloat16), kept.clone()
    if batch.pc is not None:
        held = materialized_stack(batch, weight, None)
        return PCStack(held, kept, gradient, parameter)
    state = batch.rule.init_state(weight)
    return Stack(batch.rule, batch.rates, weight, kept, gradient, state, parameter)


class Ours:
    """One rank's units under our rules, as stacks; elementwise units of one assignment are one
    stack."""

    def __init__(self, share: Share, assign: Assign, device: torch.device) -> None:
        self.factor = torch.ones((), device=device)
        self.active = torch.ones((), dtype=torch.bool, device=device)
        self.stacks: list[Stack | PCStack] = []
        whole = [unit for unit in share.matrices if assign(unit).has_owner]
        transfers = [UnitTransfer(unit, 0, (0,), (), ()) for unit in whole]
        for batch in owned_stacks(transfers, assign, device):
            self.stacks.append(new_stack(batch, device))
        sizes: Counter[Assignment] = Counter()
        for unit in share.matrices:
            if not assign(unit).has_owner:
                sizes[assign(unit)] += unit.numel
        for unit in share.elementwise:
            sizes[assign(unit)] += share.part(unit)
        for assigned, numel in sizes.items():
            weight, kept = (torch.randn(1, numel, device=device) for _ in range(2))
            state, parameter = assigned.rule.init_state(weight), weight.bfloat16()
            rates = UnitRates(assigned.lr, assigned.weight_decay)
            self.stacks.append(
                Stack(assigned.rule, rates, weight, kept, kept.clone(), state, parameter)
            )

    def prepare(self) -> None:
        """Restore the gradients."""
        for stack in self.stacks:
            stack.gradient.copy_(stack.kept)

    def step(self) -> None:
        """Update all weights once."""
        for stack in self.stacks:
            stack.step(self.factor, self.active)


class Torch:
    """PyTorch's AdamW on everything, or its Muon on matrices and its AdamW on the rest."""

    def __init__(self, share: Share, device: torch.device, *, muon: bool) -> None:
        shapes = [unit.shape for unit in share.matrices]
        rest = sum(map(share.part, share.elementwise))
        mine = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        flat = [torch.nn.Parameter(torch.randn(rest, device=device))]
        for parameter in (*mine, *flat):
            parameter.grad = torch.randn_like(parameter)
        self.optimizers: list[torch.optim.Optimizer] = []
        if muon:
            self.optimizers.append(
                torch.optim.Muon(
                    mine, lr=5e-3, weight_decay=0.1, momentum=BETA, ns_steps=slow_reference.STEPS
                )
            )
        self.optimizers.append(
            torch.optim.AdamW(flat if muon else [*mine, *flat], lr=1e-3, fused=True)
        )

    def prepare(self) -> None:
        """Do nothing: these optimizers leave gradients as they are."""

    def step(self) -> None:
        """Update all weights once."""
        for optimizer in self.optimizers:
            optimizer.step()


PUBLIC_SSO = {
    "msign_steps": slow_reference.STEPS,
    "solver_tolerance_f": TOLERANCE,
    "solver_max_iterations": slow_reference.MAX_BISECTIONS,
}
"""Settings of the public SSO: steps and bisections of its command line, and our tolerance, which
ends more of its solves than its 1e-8."""


class PublicSSO:
    """SSO of Unakar/Megatron-LM (branch spectral_ball) on matrices, fused AdamW on the rest."""

    def __init__(self, share: Share, device: torch.device, checkout: Path) -> None:
        """Import it from `checkout`, a folder that holds its package emerging_optimizers."""
        sys.path.insert(0, str(checkout))
        from emerging_optimizers.orthogonalized_optimizers import (  # type: ignore[import-not-found]
            SpectralBall,
        )

        mine: list[torch.nn.Parameter] = []
        self.kept: list[Tensor] = []
        for shape, count in Counter(unit.shape for unit in share.matrices).items():
            weights, gradients = aligned(count, shape, device)
            mine += map(torch.nn.Parameter, weights.unbind())
            self.kept += gradients.unbind()
        rest = torch.nn.Parameter(torch.randn(sum(map(share.part, share.elementwise))).to(device))
        self.kept.append(torch.randn_like(rest))
        self.parameters = [*mine, rest]
        self.optimizers = [
            SpectralBall(mine, lr=5e-3, momentum_beta=BETA, weight_decay=0.1, **PUBLIC_SSO),
            torch.optim.AdamW([rest], lr=1e-3, fused=True),
        ]

    def prepare(self) -> None:
        """Restore the gradients."""
        for parameter, gradient in zip(self.parameters, self.kept, strict=True):
            parameter.grad = gradient.clone()

    def step(self) -> None:
        """Update all weights once."""
        for optimizer in self.optimizers:
            optimizer.step()


def slow_milliseconds(
    rule: str,
    units: Sequence[Unit],
    device: torch.device,
    time: Callable[[Callable[[], object]], float],
) -> float:
    """Milliseconds of the slow reference for all of these matrices.

    It treats them one by one, so `time` measures one of each shape.
    """
    total = 0.0
    for shape, count in Counter(unit.shape for unit in units).items():
        weight, gradient = (stack[0] for stack in aligned(1, shape, device))
        momentum = torch.zeros_like(weight)

        def step(
            weight: Tensor = weight, gradient: Tensor = gradient, momentum: Tensor = momentum
        ) -> None:
            slow_reference.step(
                rule, weight, gradient, momentum, lr=5e-3, beta=BETA, weight_decay=0.1,
                tolerance=TOLERANCE, dtype=torch.bfloat16,
            )  # fmt: skip

        total += count * time(step)
    return total
