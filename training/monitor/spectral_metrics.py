"""Metrics across all ranks: PC layers, refused updates, and multiplier solves that missed their
tolerance."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from parallel.comm.collectives import MAX, all_reduce_, from_all
from parallel.comm.groups import Groups
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from spectral.effective_weight import DOMAIN

SHOWN = 8
"""Maximum number of units with refused updates to list in a report."""


class Refusals:
    """Counts refused updates, i.e. updates that are not finite or did not stay bounded.

    The optimizer skips refused updates; this class only reports them.

    Attributes:
        total: number of refusals reported since the start of the run, across all ranks.
        worst: unit with the most consecutive refusals before the last report, as (name, number).
    """

    def __init__(self, optimizer: DistributedOptimizer, groups: Groups) -> None:
        self.optimizer = optimizer
        self._none = torch.zeros((), device=groups.device)
        self.worst: tuple[str, int] = ("", 0)
        self.restore(0.0)

    def restore(self, total: float) -> None:
        """Set the number of reported refusals to `total`, and discard unreported refusals."""
        self.total = total
        self._names: list[str] = []  # unit names for the tensors `[names]` below
        self._new = self._streak = self._longest = self._none.new_zeros(0)

    def new(self) -> float:
        """Return the number of refusals since the last report, across all ranks. Collective."""
        return over_ranks(self.optimizer, self._new.sum())

    def record(self) -> None:
        """Count the refusals in a step, without a host sync."""
        counts = dict(self.optimizer.refused())
        names = set(self._names)
        added = [name for name in counts if name not in names]
        if added:  # nearly all units are added in the first step
            self._names += added
            more = self._none.new_zeros(len(added))
            self._new, self._streak, self._longest = (
                torch.cat([counted, more]) for counted in (self._new, self._streak, self._longest)
            )
        if not self._names:
            return
        refused = torch.stack([counts.get(name, self._none) for name in self._names])
        self._streak = (self._streak + 1) * (refused > 0)
        self._new = self._new + refused
        self._longest = torch.maximum(self._longest, self._streak)

    def summary(self) -> dict[str, float]:
        """Return the metrics and start a new report. Waits for the device and all ranks.

        optim/refused         number of refused updates since the start of the run
        optim/refused/<unit>  number since the last report, for the most affected units
        """
        new, self.worst = self.new(), ("", 0)
        self.total += new
        metrics = {"optim/refused": self.total}
        if new:
            # (unit, refusals, most consecutive refusals) for the units on this rank
            counts = zip(self._names, self._new.tolist(), self._longest.tolist(), strict=True)
            mine = [each for each in counts if each[1]]
            rows = sorted((each for all_ in from_all(mine) for each in all_), key=lambda e: -e[1])
            metrics |= {f"optim/refused/{name}": count for name, count, _ in rows[:SHOWN]}
            name, _, streak = max(rows, key=lambda each: each[2], default=("", 0, 0))
            self.worst = name, round(streak)
        self._new, self._longest = torch.zeros_like(self._new), torch.zeros_like(self._longest)
        return metrics


def over_ranks(optimizer: DistributedOptimizer, count: Tensor) -> float:
    """Sum a count `[]` across all ranks. Collective."""
    return float(all_reduce_(count, None, optimizer.model.comm_volume, "metrics").item())


class SpectralMetrics:
    """Counts unconverged solves, refused updates and norm corrections over all units and ranks. The
    metrics of individual units are in monitors.jsonl."""

    def __init__(
        self, optimizer: DistributedOptimizer, groups: Groups, *, preconditioned: bool = False
    ) -> None:
        """`preconditioned` is True if the model has PC layers on any rank."""
        self.optimizer = optimizer
        self.refusals = Refusals(optimizer, groups)
        self._missed = torch.zeros((), device=groups.device)
        """Number of solves on this rank since the last report that missed their tolerance."""
        self._unconverged = 0.0
        self._outside = 0
        self.preconditioned = preconditioned

    def record(self, active: Tensor) -> None:
        """Count the unconverged solves and refused updates of the step, on the device. `active` is
        False if the step was skipped."""
        for stack in self.optimizer.stacks:
            if "converged" in stack.report:
                self._missed += (1 - stack.report["converged"].float()).sum() * active
        self.refusals.record()

    def state(self) -> dict[str, float]:
        """Return the counts since the start of the run, across all ranks. Collective.

        unconverged  multiplier solves that did not reach their tolerance
        refused      refused unit updates
        outside      corrections to the tracked norm of PC layers
        """
        return {
            "unconverged": self._unconverged + over_ranks(self.optimizer, self._missed.clone()),
            "refused": self.refusals.total + self.refusals.new(),
            "outside": self._outside,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the counts returned by the method `state`."""
        self._missed.zero_()
        self._unconverged = state["unconverged"]
        self.refusals.restore(state.get("refused", 0.0))
        self._outside = int(state["outside"])

    def summary(self) -> dict[str, float]:
        """Return the metrics of solves, refusals and PC layers. Waits for the device and all ranks.

        spectral/unconverged  number of solves so far that missed their tolerance
        pc/domain/max      largest normalised singular value; the polynomials are fitted on [0, 1.1]
        pc/domain/outside  number of corrections in logged steps so far, for units outside [0, 1.1]
        pc/gamma/min, max  smallest and largest gamma over all units
        """
        self._unconverged += over_ranks(self.optimizer, self._missed)
        self._missed.zero_()
        rules = {"spectral/unconverged": self._unconverged} | self.refusals.summary()
        if not self.preconditioned:
            return rules
        seen, gammas = self.optimizer.guard_pc()
        floor = seen.new_full((1,), -math.inf)
        maxima = torch.stack([torch.cat([floor, each]).max() for each in (seen, gammas, -gammas)])
        outside = (~((seen >= 0) & (seen <= DOMAIN))).sum().float()
        comm_volume = self.optimizer.model.comm_volume
        all_reduce_(maxima, None, comm_volume, "metrics", MAX)
        all_reduce_(outside, None, comm_volume, "metrics")
        most, gamma_max, gamma_min = maxima.tolist()
        self._outside += round(outside.item())
        return rules | {
            "pc/domain/max": most,
            "pc/domain/outside": self._outside,
            "pc/gamma/min": -gamma_min,
            "pc/gamma/max": gamma_max,
        }
