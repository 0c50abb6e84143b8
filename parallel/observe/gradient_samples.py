"""Per-micro-batch gradients and their inner products, used to compute a step's gradient noise.

On every layout, the samples are the first micro-batches of the global batch. Each rank stores the
gradients of its own samples until the backward pass ends. Then all replicas receive all samples,
one parameter at a time, and keep only the inner products `[samples, samples]` of each matrix's
gradients. Experts are skipped under expert parallelism, because their gradients mix micro-batches
from several ranks.
"""

import torch
from torch import Tensor

from parallel.comm.collectives import CommVolume, all_reduce_
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.storage.domain_model import DomainModel


class GradientSamples:
    """Gradients of this rank's samples in one step."""

    def __init__(
        self, model: ParallelModel, groups: Groups, *, microbatches: int, samples: int
    ) -> None:
        """Start storing gradients.

        Args:
            model: model whose gradients are observed.
            groups: the model's process groups.
            microbatches: micro-batches per step on each rank.
            samples: number of samples; capped at the number of micro-batches in the global batch.
        """
        self.count = min(samples, microbatches * groups.data.size)
        self.first = groups.data.rank * microbatches
        self.kept: dict[str, list[Tensor]] = {}
        self.seen: dict[str, int] = {}
        alone = groups.expert.size == groups.experts.tensor.size == groups.tensor.size == 1
        self.parts = [part for part in model.domains if part.domain.name == "dense" or alone]
        self.matrices = {
            unit.parameter for part in self.parts for unit in part.units if unit.is_matrix
        }
        self.model = model
        model.sum_in_products(False)
        for part in self.parts:
            part.observe = self._observe  # drops samples that were not read

    def _observe(self, name: str, gradient: Tensor) -> None:
        if name not in self.matrices:
            return
        seen = self.seen[name] = self.seen.get(name, 0) + 1
        if self.first + seen <= self.count:
            self.kept.setdefault(name, []).append(gradient.detach().clone())

    def products(self) -> dict[str, Tensor]:
        """Return the float64 inner products `[samples, samples]` of each unit's gradients.

        Collective: all ranks of a stage must call this method. Every rank that holds a part of a
        unit gets the unit's inner products. Frees the samples.
        """
        products: dict[str, Tensor] = {}
        self.model.sum_in_products(self.model.sums_in_products)
        for part in self.parts:
            part.observe = None
            for name in sorted({u.parameter for u in part.units if u.is_matrix}):
                samples = self._samples(part, name)
                for unit in part.units:
                    if unit.parameter == name:
                        pieces = torch.stack([unit.view(g).reshape(-1) for g in samples]).double()
                        gram = pieces @ pieces.T
                        if unit.shard_axis is not None:
                            all_reduce_(gram, part.domain.tensor, CommVolume(), "samples")
                        products[unit.name] = gram
                self.kept.pop(name, None)
        return products

    def _samples(self, part: DomainModel, name: str) -> Tensor:
        """Return a parameter's gradients `[samples, elements]`, up to a common scale factor."""
        slot = part.bucket_layout.slots[name][1]
        like = part.gradients[0]
        samples = like.new_zeros(self.count, slot.numel)
        for i, gradient in enumerate(self.kept.get(name, [])):
            samples[self.first + i].copy_(gradient.flatten())
        all_reduce_(samples, part.domain.replicas, CommVolume(), "samples")
        for axis, _, units in part.partial_sums:
            if any(unit.parameter == name for unit in units):
                all_reduce_(samples, axis, CommVolume(), "samples")
        return samples
