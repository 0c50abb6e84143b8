"""The gradients of single micro-batches, and their inner products: what the noise of a step is.

The samples are the first micro-batches of the global batch, the same ones on every layout. Each
rank keeps its own samples' gradients until the step's backward is over; then, a parameter at a
time, all ranks with copies see all samples, and of each matrix only the products `[samples,
samples]` stay. Experts that ranks share are left out: their gradients come from the micro-batches
of several ranks at once.
"""

import torch
from torch import Tensor

from parallel.comm.collectives import Traffic, all_reduce_
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.storage.domain_model import DomainModel


class GradientSamples:
    """Keeps the gradients of this rank's samples of one step."""

    def __init__(
        self, model: ParallelModel, groups: Groups, *, microbatches: int, samples: int
    ) -> None:
        """Starts to keep; `microbatches` are those of a step on one rank."""
        self.groups = groups
        self.count = min(samples, microbatches * groups.data.size)
        self.first = groups.data.rank * microbatches
        self.kept: dict[str, list[Tensor]] = {}
        self.seen: dict[str, int] = {}
        alone = groups.expert.size == groups.experts.tensor.size == groups.tensor.size == 1
        self.parts = [part for part in model.domains if part.domain.name == "dense" or alone]
        self.matrices = {
            unit.parameter for part in self.parts for unit in part.units if unit.is_matrix
        }
        for part in self.parts:
            part.reducer.observe = self._observe

    def _observe(self, name: str, gradient: Tensor) -> None:
        if name not in self.matrices:
            return
        seen = self.seen[name] = self.seen.get(name, 0) + 1
        if self.first + seen <= self.count:
            self.kept.setdefault(name, []).append(gradient.detach().clone())

    def products(self) -> dict[str, Tensor]:
        """The inner products `[samples, samples]` of every matrix's gradients, float64, on every
        rank that has a part of it; all ranks of a stage together."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            part.reducer.observe = None
            for name in sorted({u.parameter for u in part.units if u.is_matrix}):
                samples = self._samples(part, name)
                for unit in part.units:
                    if unit.parameter == name:
                        pieces = torch.stack([unit.view(g).reshape(-1) for g in samples]).double()
                        gram = pieces @ pieces.T
                        if unit.shard_axis is not None:
                            all_reduce_(gram, part.domain.tensor, Traffic(), "samples")
                        found[unit.name] = gram
                self.kept.pop(name, None)
        return found

    def _samples(self, part: DomainModel, name: str) -> Tensor:
        """Every sample's gradient `[samples, ...]` of a parameter, up to a common factor."""
        slot = part.buffers.layout.slots[name][1]
        like = part.buffers.gradients[0]
        found = like.new_zeros(self.count, slot.numel)
        for i, gradient in enumerate(self.kept.get(name, [])):
            found[self.first + i].copy_(gradient.flatten())
        all_reduce_(found, part.domain.replicas, Traffic(), "samples")
        if name in part.reducer.tensor_sums:
            all_reduce_(found, part.domain.tensor, Traffic(), "samples")
        return found
