"""How concentrated the noise of the penalised units' gradients is: what may switch the penalty.

The gradients of the first micro-batches of a step are compared, as monitors do, of the penalised
dense units alone. Experts are left out on every layout: where ranks share them, their gradients
come from the micro-batches of several ranks at once, and no layout may show in what is decided.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import Traffic, all_reduce_
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.observe.gradient_samples import GradientSamples
from parallel.storage.domain_model import DomainModel
from spectral.measures import noise_of, spike_share


class PenaltySamples(GradientSamples):
    """Keeps this rank's samples of the penalised units' gradients of one step, beside whoever else
    watches the gradients."""

    def __init__(
        self,
        model: ParallelModel,
        groups: Groups,
        penalised: Callable[[Unit], bool],
        *,
        microbatches: int,
        samples: int,
    ) -> None:
        """Starts to keep; arguments as those of `GradientSamples`."""
        watching = [part.reducer.observe for part in model.domains]
        super().__init__(model, groups, microbatches=microbatches, samples=samples)
        for part, observe in zip(model.domains, watching, strict=True):
            part.reducer.observe = observe
        self.parts = [_of_units(p, penalised) for p in model.domains if p.domain.name == "dense"]
        self.matrices = {unit.parameter for part in self.parts for unit in part.units}
        for part in self.parts:
            part.reducer.observe = _both(part.reducer.observe, self._observe)

    def concentration(self) -> float:
        """The mean over units of the share of the gradient's noise that lies in its top direction
        (`spectral.measures.spike_share`), 0 if no gradient has any noise; all ranks together."""
        products = self.products()
        counted = [products[u.name] for p in self.parts for u in p.units if _counts(p, u)]
        sums = torch.zeros(2, dtype=torch.float64, device=self.groups.device)
        if counted:
            noise = noise_of(torch.stack(counted))
            noisy = noise.top_share != 0  # of a gradient that is not finite it is NaN
            shares = spike_share(noise.top_share, self.count)
            sums[0] = torch.where(noisy, shares, 0).sum()
            sums[1] = noisy.sum()
        all_reduce_(sums, None, Traffic(), "penalty noise")
        total, units = sums.tolist()
        return float(total / max(1.0, units))


def _of_units(part: DomainModel, penalised: Callable[[Unit], bool]) -> DomainModel:
    """The same domain with the units that are penalised alone."""
    kept = [[unit for unit in units if penalised(unit)] for units in part.stage_units]
    return replace(part, stage_units=kept)


def _counts(part: DomainModel, unit: Unit) -> bool:
    """Whether this rank is the one of those that have the unit, or a piece of it, that adds it to
    the sum over all ranks."""
    domain = part.domain
    shared = unit.replicated or unit.shard_axis is not None
    return domain.replicas.rank == 0 and (domain.tensor.rank == 0 or not shared)


Observer = Callable[[str, Tensor], None]


def _both(first: Observer | None, second: Observer) -> Observer:
    """An observer that calls both."""
    if first is None:
        return second
    before = first

    def observe(name: str, gradient: Tensor) -> None:
        before(name, gradient)
        second(name, gradient)

    return observe
