"""What the spectral rules report, summed up over all units and ranks for one line of metrics."""

import torch
from torch import Tensor

from parallel.collectives import MAX, all_reduce_
from parallel.groups import Groups
from parallel.optimizer import DistributedOptimizer


class SpectralMetrics:
    """Summary of the rules' reports: largest, mean and counted figures over every unit once."""

    def __init__(self, optimizer: DistributedOptimizer, groups: Groups) -> None:
        self.optimizer = optimizer
        self.groups = groups
        self._unconverged: Tensor = torch.zeros((), device=groups.device)

    def record(self) -> None:
        """None; adds this step's solves without success to a count on the device."""
        for batch in self.optimizer.batches:
            if "converged" in batch.report:
                self._unconverged += (1 - batch.report["converged"].float()).sum()

    def unconverged(self) -> float:
        """Solves without success since the start of the run, over all ranks; waits for them."""
        total = self._unconverged.clone()
        return all_reduce_(total, None, self.optimizer.model.traffic, "metrics").item()

    def restore(self, unconverged: float) -> None:
        """None; counts on from what `unconverged` gave."""
        self._unconverged.fill_(unconverged if self.groups.rank == 0 else 0.0)

    def summary(self) -> dict[str, float]:
        """Figures of the last step; waits for the device and all ranks.

        spectral/units           matrices that a whole-matrix rule stepped
        spectral/radius_err/max  largest |sigma / radius - 1| before retraction
        spectral/residual/max    largest |f| the multiplier solver left
        spectral/evaluations/mean  msign evaluations per solve
        spectral/unconverged     solves above tolerance since the start of the run
        optim/update_rms/mean    mean over units of the update's root mean square, before lr
        """
        sums, maxima = self._collect()
        traffic = self.optimizer.model.traffic
        all_reduce_(sums, None, traffic, "metrics")
        all_reduce_(maxima, None, traffic, "metrics", MAX)
        units, solves, evaluations, rms, unconverged = sums.tolist()
        if not units:
            return {}
        metrics = {"spectral/units": units, "optim/update_rms/mean": rms / units}
        if maxima[0] >= 0:
            metrics["spectral/radius_err/max"] = maxima[0].item()
        if solves:
            metrics["spectral/residual/max"] = maxima[1].item()
            metrics["spectral/evaluations/mean"] = evaluations / solves
            metrics["spectral/unconverged"] = unconverged
        return metrics

    def _collect(self) -> tuple[Tensor, Tensor]:
        zero = torch.zeros((), device=self.groups.device)
        sums = [zero.clone() for _ in range(4)]
        maxima = [zero - 1, zero - 1]
        for batch in self.optimizer.batches:
            report = batch.report
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
        return torch.stack([*sums, self._unconverged]), torch.stack(maxima)
