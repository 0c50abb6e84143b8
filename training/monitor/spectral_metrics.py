"""Metrics of spectral rules and PC layers, aggregated over all units and ranks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from parallel.comm.collectives import MAX, all_reduce_
from parallel.comm.groups import Groups
from parallel.optimizer.optimizer import DistributedOptimizer
from spectral.effective_weight import DOMAIN
from training.monitor.unit_counts import Refusals, Solves


class SpectralMetrics:
    """Aggregates of the rules' reports: maxima, means and counts over all units."""

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
        """Return the metrics of `_rules` and `_preconditioned`; waits for device and ranks."""
        rules = self._rules() | self.refusals.summary()
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

    def _rules(self) -> dict[str, float]:
        """Return the metrics of whole-matrix rules.

        spectral/units             matrices that a whole-matrix rule stepped
        spectral/radius_err/max    largest |sigma / radius - 1| before retraction
        spectral/residual/max      largest |f| that the multiplier solver left
        spectral/evaluations/mean  msign evaluations per solve
        optim/update_rms/mean      root mean square of the update before the learning rate, mean
                                   over units
        """
        sums, maxima = self._collect()
        comm_volume = self.optimizer.model.comm_volume
        all_reduce_(sums, None, comm_volume, "metrics")
        all_reduce_(maxima, None, comm_volume, "metrics", MAX)
        units, solves, evaluations, rms = sums.tolist()
        if not units:
            return {}
        metrics = {"spectral/units": units, "optim/update_rms/mean": rms / units}
        if maxima[0] >= 0:
            metrics["spectral/radius_err/max"] = maxima[0].item()
        if solves:
            metrics["spectral/residual/max"] = maxima[1].item()
            metrics["spectral/evaluations/mean"] = evaluations / solves
            metrics |= self.solves.summary()
        return metrics

    def _collect(self) -> tuple[Tensor, Tensor]:
        zero = torch.zeros((), device=self.groups.device)
        sums = [zero.clone() for _ in range(4)]
        maxima = [zero - 1, zero - 1]
        for batch in self.optimizer.stacks:
            report = batch.report
            if not batch.rule.whole_matrix:
                continue
            sums[0] += len(batch.units)
            if "update_rms" in report:
                sums[3] += report["update_rms"].float().sum()
            if "residual" in report:
                sums[1] += len(batch.units)
                sums[2] += report["evaluations"].float().sum()
                maxima[1] = torch.maximum(maxima[1], report["residual"].float().abs().max())
            if "radius" in report:
                error = (report["sigma"] / report["radius"] - 1).abs().float().max()
                maxima[0] = torch.maximum(maxima[0], error)
        return torch.stack(sums), torch.stack(maxima)
