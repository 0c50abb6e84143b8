"""What went wrong with single units since the last report, counted on the device by unit."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.comm.collectives import all_reduce_, from_all
from parallel.comm.groups import Groups
from parallel.optimizer.optimizer import DistributedOptimizer
from spectral.rules.base import settings

SHOWN = 8
"""Refused units that are named in one report."""


class Events(ABC):
    """Events of units since the start of the run, of which some are new since the last report."""

    def __init__(self, optimizer: DistributedOptimizer, groups: Groups) -> None:
        self.optimizer = optimizer
        self.total = 0.0
        self._none = torch.zeros((), device=groups.device)
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Drop what is new."""

    @abstractmethod
    def _new_here(self) -> Tensor:
        """Return how many are new on this rank."""

    def _sum(self) -> float:
        total = self._new_here()
        all_reduce_(total, None, self.optimizer.model.comm_volume, "metrics")
        return float(total.item())

    def state(self) -> float:
        """Return the events since the start of the run, over all ranks; waits for them."""
        return self.total + self._sum()

    def restore(self, total: float) -> None:
        """Continue from what `state` returned."""
        self.total = total
        self._forget()


class Refusals(Events):
    """Counter of steps that units did not take, because the update was not finite or not bounded.

    Weights stay finite without it; it is what says so.

    Attributes:
        worst: the unit with most refusals in a row before the last report, and how many.
    """

    worst: tuple[str, int] = ("", 0)

    def _forget(self) -> None:
        self._names: list[str] = []  # of the entries of the following, `[names]` each
        self._new = self._row = self._longest = self._none.new_zeros(0)

    def _new_here(self) -> Tensor:
        return self._new.sum()

    def record(self) -> None:
        """Count the refusals of a step, without waiting for the device."""
        found = dict(self.optimizer.refused())
        known = set(self._names)
        self._add_names([name for name in found if name not in known])
        if not self._names:
            return
        refused = torch.stack([found.get(name, self._none) for name in self._names])
        self._row = (self._row + 1) * (refused > 0)
        self._new = self._new + refused
        self._longest = torch.maximum(self._longest, self._row)

    def _add_names(self, names: list[str]) -> None:
        """Begin to count for more names; the first step has nearly all that there will be."""
        if not names:
            return
        self._names += names
        more = self._none.new_zeros(len(names))
        self._new, self._row, self._longest = (
            torch.cat([counts, more]) for counts in (self._new, self._row, self._longest)
        )

    def _counted(self) -> list[tuple[str, float, float]]:
        """Return units that this rank steps, if any, with their refusals and most in a row."""
        return list(zip(self._names, self._new.tolist(), self._longest.tolist(), strict=True))

    def summary(self) -> dict[str, float]:
        """Return the metrics since the last report; waits for device and ranks.

        optim/refused         refused steps of units since the start of the run
        optim/refused/<unit>  since the last report, of the units with most of them
        """
        new, self.worst = self._sum(), ("", 0)
        self.total += new
        metrics = {"optim/refused": self.total}
        if new:
            mine = [each for each in self._counted() if each[1]]
            found = sorted((each for all_ in from_all(mine) for each in all_), key=lambda e: -e[1])
            metrics |= {f"optim/refused/{name}": count for name, count, _ in found[:SHOWN]}
            name, _, row = max(found, key=lambda each: each[2], default=("", 0, 0))
            self.worst = name, round(row)
        self._new, self._longest = torch.zeros_like(self._new), torch.zeros_like(self._longest)
        return metrics


@dataclass(frozen=True)
class RoleSolves:
    """Multiplier solves of the units of one role: how many, missed ones, and the largest |f|."""

    solves: float
    missed: float
    residual: float


class Solves(Events):
    """Counter of multiplier solves that missed their tolerance, by role."""

    def _forget(self) -> None:
        self._steps = self._none.clone()
        self._missed: dict[int, Tensor] = {}
        self._residual: dict[int, Tensor] = {}

    def _new_here(self) -> Tensor:
        return sum((missed.sum() for missed in self._missed.values()), self._none.clone())

    def record(self, active: Tensor) -> None:
        """Count the solves of a step, if it is `active`, without waiting for the device."""
        self._steps += active
        for i, stack in enumerate(self.optimizer.stacks):
            if "converged" not in stack.report:
                continue
            missed = (1 - stack.report["converged"].float()) * active
            residual = torch.where(active, stack.report["residual"].float().abs(), 0)
            before = self._missed.get(i)
            self._missed[i] = missed if before is None else before + missed
            self._residual[i] = (
                residual if before is None else torch.maximum(self._residual[i], residual)
            )

    def summary(self) -> dict[str, float]:
        """Return the metrics since the last report; waits for device and ranks.

        spectral/unconverged            misses since the start of the run
        spectral/unconverged/<role>     since the last report, of roles that have any
        spectral/solves/<role>          solves of such a role
        spectral/residual/max/<role>    their largest |f|
        spectral/tolerance              the largest tolerance of a solve
        """
        new = self._sum()
        self.total += new
        metrics = {"spectral/unconverged": self.total}
        if new:
            tolerances = [
                tolerance
                for stack in self.optimizer.stacks
                if (tolerance := settings(stack.rule).get("tolerance")) is not None
            ]
            everyone = from_all((dict(self._by_role()), max(tolerances, default=0.0)))
            metrics["spectral/tolerance"] = max(tolerance for _, tolerance in everyone)
            metrics |= role_metrics([roles for roles, _ in everyone])
        self._forget()
        return metrics

    def _by_role(self) -> Iterator[tuple[str, RoleSolves]]:
        """Yield the solves of each role on this rank."""
        steps = self._steps.item()
        found: dict[str, list[tuple[float, float]]] = {}
        for i, missed in self._missed.items():
            units = self.optimizer.stacks[i].units
            figures = zip(units, missed.tolist(), self._residual[i].tolist(), strict=True)
            for unit, count, residual in figures:
                found.setdefault(unit.role, []).append((count, residual))
        for role, each in found.items():
            yield (
                role,
                RoleSolves(
                    steps * len(each), sum(count for count, _ in each), max(r for _, r in each)
                ),
            )


def role_metrics(ranks: Sequence[Mapping[str, RoleSolves]]) -> dict[str, float]:
    """Return the metrics of the roles that missed a tolerance on any rank."""
    metrics: dict[str, float] = {}
    for role in sorted({role for roles in ranks for role in roles}):
        each = [roles[role] for roles in ranks if role in roles]
        missed = sum(one.missed for one in each)
        if missed:
            metrics[f"spectral/unconverged/{role}"] = missed
            metrics[f"spectral/solves/{role}"] = sum(one.solves for one in each)
            metrics[f"spectral/residual/max/{role}"] = max(one.residual for one in each)
    return metrics
