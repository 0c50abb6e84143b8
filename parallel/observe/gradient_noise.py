"""How concentrated the noise of the penalised units' gradients is: a trigger of the Gram penalty.

It is measured like the noise that monitors report, but for penalised dense units alone. Experts are
left out on every layout, also where no ranks share them, so that the decision does not depend on
the layout.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from models.units import Unit
from parallel.comm.collectives import CommVolume, all_reduce_
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.observe.gradient_samples import GradientSamples
from parallel.storage.domain_model import DomainModel
from spectral.measures import noise_of, spike_share


class PenaltySamples(GradientSamples):
    """Keeps this rank's samples of the penalised units' gradients of one step."""

    observer = "penalty samples"

    def __init__(
        self,
        model: ParallelModel,
        groups: Groups,
        penalised: Callable[[Unit], bool],
        *,
        microbatches: int,
        samples: int,
    ) -> None:
        """Start to keep gradients; the arguments are those of `GradientSamples`."""
        dense = [part for part in model.domains if part.domain.name == "dense"]
        super().__init__(
            model,
            groups,
            microbatches=microbatches,
            samples=samples,
            parts=[_with_units(part, penalised) for part in dense],
        )

    def concentration(self) -> float:
        """Mean over units of the share of a gradient's noise that lies in its top direction.

        The share is `spectral.measures.spike_share`; the mean is 0 if no gradient has any noise.
        All ranks call it together.
        """
        products = self.products()
        counted = [products[u.name] for p in self.parts for u in p.units if _counts(p, u)]
        sums = torch.zeros(2, dtype=torch.float64, device=self.groups.device)
        if counted:
            noise = noise_of(torch.stack(counted))
            noisy = noise.top_share != 0  # of a gradient that is not finite it is NaN
            shares = spike_share(noise.top_share, self.count)
            sums[0] = torch.where(noisy, shares, 0).sum()
            sums[1] = noisy.sum()
        all_reduce_(sums, None, CommVolume(), "penalty noise")
        total, units = sums.tolist()
        return float(total / max(1.0, units))


def _with_units(part: DomainModel, penalised: Callable[[Unit], bool]) -> DomainModel:
    """The same domain with its penalised units only."""
    kept = [[unit for unit in units if penalised(unit)] for units in part.stage_units]
    return replace(part, stage_units=kept)


def _counts(part: DomainModel, unit: Unit) -> bool:
    """Whether this rank, among those that hold the unit or a piece of it, counts it in sums."""
    domain = part.domain
    shared = unit.replicated or unit.shard_axis is not None
    return domain.replicas.rank == 0 and (domain.tensor.rank == 0 or not shared)
