"""Counts of what spectral rules missed and refused, and metrics of PC layers, over all ranks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from parallel.comm.collectives import MAX, all_reduce_
from parallel.comm.groups import Groups
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from spectral.effective_weight import DOMAIN
from training.monitor.unit_counts import Refusals, Solves


class SpectralMetrics:
    """Counts over all units and ranks; the rules' own reports are in monitors.jsonl."""

    def __init__(
        self, optimizer: DistributedOptimizer, groups: Groups, *, preconditioned: bool = False
    ) -> None:
        """`preconditioned` is whether the model has PC layers, on any rank."""
        self.optimizer = optimizer
        self.groups = groups
        self.solves = Solves(optimizer, groups)
        self.refusals = Refusals(optimizer, groups)
        self._outside = 0
        self.preconditioned = preconditioned

    def record(self, active: Tensor) -> None:
        """Count what the step reports, on the device; `active` is whether it was taken."""
        self.solves.record(active)
        self.refusals.record()

    def state(self) -> dict[str, float]:
        """Return counts since the start of the run, over all ranks; waits for them.

        unconverged  multiplier solves that missed the tolerance
        refused      steps that units did not take
        outside      PC units whose tracked norm had to be corrected
        """
        return {
            "unconverged": self.solves.state(),
            "refused": self.refusals.state(),
            "outside": self._outside,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        self.solves.restore(state["unconverged"])
        self.refusals.restore(state.get("refused", 0.0))
        self._outside = int(state["outside"])

    def summary(self) -> dict[str, float]:
        """Return what units missed or refused, and the metrics of PC layers; waits for device and
        ranks."""
        rules = self.solves.summary() | self.refusals.summary()
        return rules | (self._preconditioned() if self.preconditioned else {})

    def _preconditioned(self) -> dict[str, float]:
        """Return the metrics of PC layers.

        pc/domain/max      largest normalised singular value; the polynomials are fitted on [0, 1.1]
        pc/domain/outside  units found outside that interval on logging steps so far, and corrected
        pc/gamma/min, max  over all units
        """
        seen, gammas = self.optimizer.guard_pc()
        floor = seen.new_full((1,), -math.inf)
        maxima = torch.stack([torch.cat([floor, each]).max() for each in (seen, gammas, -gammas)])
        outside = (~((seen >= 0) & (seen <= DOMAIN))).sum().float()
        comm_volume = self.optimizer.model.comm_volume
        all_reduce_(maxima, None, comm_volume, "metrics", MAX)
        all_reduce_(outside, None, comm_volume, "metrics")
        most, gamma_max, gamma_min = maxima.tolist()
        self._outside += round(outside.item())
        return {
            "pc/domain/max": most,
            "pc/domain/outside": self._outside,
            "pc/gamma/min": -gamma_min,
            "pc/gamma/max": gamma_max,
        }
