"""Updates of a monitored step and of the steps before it.

The update of a step is the change of the weights in this step, including retraction but excluding
weight decay. The history stores the weights before the monitored step, and before each of the
preceding steps that the metrics require.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.units import Unit
from parallel.observe.unit_gather import Snapshot, UnitGather, weights
from parallel.optimizer.distributed_optimizer import DistributedOptimizer


@dataclass
class Moment:
    """Weights before a step, and the step's learning rate."""

    weights: Snapshot
    factor: Tensor | float = 0.0  # learning rate divided by its peak; 0 if the step was skipped


@dataclass(frozen=True)
class Updates:
    """The weights of matrices of the same shape before, between and after consecutive steps.

    weights  `[units, rows, cols]` each: before each step, oldest first, and after the last step
    kept     `[units, 1, 1]` per step: the factor 1 - lr * weight_decay
    """

    units: list[Unit]
    weights: Sequence[Tensor]
    kept: Sequence[Tensor]


class UpdateHistory:
    """Stores the weights before each of the last `depth` steps."""

    def __init__(self, optimizer: DistributedOptimizer, depth: int) -> None:
        self.optimizer = optimizer
        self.assign = optimizer.domains[0].assign
        self.depth = depth
        self.moments: list[Moment] = []

    def forget(self) -> None:
        """Drop the stored weights, e.g. after a rewind."""
        self.moments.clear()

    def begin(self, steps_left: int) -> None:
        """Store the weights before the current step if the next monitored step requires them. The
        next monitored step is `steps_left` steps ahead."""
        if steps_left >= self.depth:
            self.forget()
            return
        self.moments.append(Moment(weights(self.optimizer, copy=True)))
        del self.moments[: -self.depth]

    def end(self, factor: float, active: Tensor) -> None:
        """Record the learning rate of the current step.

        factor  learning rate divided by its peak
        active  whether the step was taken, not skipped
        """
        if self.moments:
            self.moments[-1].factor = factor * active

    def updates(self, unit_gather: UnitGather) -> Iterator[Updates]:
        """Yield the updates of the matrices that this rank inspects and of the PC layers that this
        rank owns.

        Collective over the ranks of the stage. When the next result is requested, the weights in
        the previous result are freed.
        """
        after = weights(self.optimizer, copy=False)
        every = [*(moment.weights for moment in self.moments), after]
        factors = [float(moment.factor) for moment in self.moments]  # waits for the device
        shards = {str(i): each.shards for i, each in enumerate(every)}
        for inspection in unit_gather.inspections(shards):
            plain = [i for i, unit in enumerate(inspection.units) if self.assign(unit).pc is None]
            if plain:
                matrices = [inspection.matrices[key] for key in shards]
                if len(plain) < len(inspection.units):
                    matrices = [each[plain] for each in matrices]
                yield self._of([inspection.units[i] for i in plain], matrices, factors)
                matrices.clear()
        for batch in self.optimizer.materialized:
            matrices = [
                torch.stack([each.whole[unit.name] for unit in batch.units]) for each in every
            ]
            yield self._of(batch.units, matrices, factors)

    def learning_rate(self, unit: Unit) -> float:
        """Return a unit's learning rate in the last step."""
        return self.assign(unit).lr * float(self.moments[-1].factor)

    def _of(
        self, units: list[Unit], matrices: Sequence[Tensor], factors: Sequence[float]
    ) -> Updates:
        assigned = [self.assign(unit) for unit in units]
        decays = [[1 - a.lr * factor * a.weight_decay for a in assigned] for factor in factors]
        kept = torch.tensor(decays, dtype=torch.float64, device=matrices[0].device)
        return Updates(units, matrices, kept[..., None, None].unbind())
