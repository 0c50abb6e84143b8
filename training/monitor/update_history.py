"""What the last steps added to the weights, kept until a step that is looked at.

A step's update is the difference of the weights after and before it, less what weight decay took:
the retraction is part of it. The weights that successive steps began with are kept, as many as the
figures need, and only shortly before a step that is looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.units import Unit
from parallel.observe.unit_gather import (
    Inspection,
    Snapshot,
    UnitGather,
    materialized_stacks,
    weights,
)
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.optimizer.routing import Assignment


@dataclass
class Moment:
    """What a step began with, and how long it was."""

    weights: Snapshot
    factor: Tensor | float = 0.0  # of the peak learning rate; 0 for a step that was not taken
    on_spectral: dict[str, float] = field(default_factory=dict)  # of matrices that can choose


@dataclass(frozen=True)
class Updates:
    """Matrices of one shape, and what successive steps added to them.

    weights   `[units, rows, cols]` each: those that the steps began with, oldest first, and those
              after the last step
    kept      `[units, 1, 1]` each: what weight decay left of the weights in each step
    """

    units: list[Unit]
    weights: Sequence[Tensor]
    kept: Sequence[Tensor]

    def last(self, index: int) -> Tensor:
        """`[units, rows, cols]`, float64: the update of the last step (1), the one before it (2),
        and so on."""
        old, new = self.weights[-index - 1].double(), self.weights[-index].double()
        return new - old * self.kept[-index]


class UpdateHistory:
    """Keeps the weights that the last `depth` steps began with."""

    def __init__(self, optimizer: DistributedOptimizer, depth: int) -> None:
        self.optimizer = optimizer
        self.depth = depth
        self.moments: list[Moment] = []

    def forget(self) -> None:
        """None; what was kept does not precede the next step."""
        self.moments.clear()

    def begin(self, steps_left: int) -> None:
        """None; before a step that `steps_left` others follow until one is looked at."""
        if steps_left >= self.depth:
            self.forget()
            return
        self.moments.append(Moment(weights(self.optimizer, copy=True)))
        del self.moments[: -self.depth]

    def end(
        self, factor: float, active: Tensor, on_spectral: Callable[[], dict[str, float]]
    ) -> None:
        """None; after a step of `factor` times the peak learning rate, if it was `active`;
        `on_spectral` tells the rules from which matrices took it."""
        if self.moments:
            self.moments[-1].factor = factor * active
            self.moments[-1].on_spectral = on_spectral()

    def updates(self, unit_gather: UnitGather) -> Iterator[Updates]:
        """Every matrix that this rank is the inspection rank of, or steps as the owner of a
        preconditioned one; all ranks of the stage together."""
        after = weights(self.optimizer, copy=False)
        every = [*(moment.weights for moment in self.moments), after]
        factors = [float(moment.factor) for moment in self.moments]
        for inspection in unit_gather.inspections(
            {str(i): each.shards for i, each in enumerate(every)}
        ):
            plain = [i for i, unit in enumerate(inspection.units) if self.assign(unit).pc is None]
            if plain:
                yield self._of(
                    [inspection.units[i] for i in plain], self._chosen(inspection, plain), factors
                )
        for batch in materialized_stacks(self.optimizer):
            matrices = [
                torch.stack([each.whole[unit.name] for unit in batch.units]) for each in every
            ]
            yield self._of(batch.units, matrices, factors)

    def learning_rate(self, unit: Unit) -> float:
        """The learning rate of the last step."""
        return self.assign(unit).lr * float(self.moments[-1].factor)

    def assign(self, unit: Unit) -> Assignment:
        """What steps a unit."""
        return self.optimizer.domains[0].assign(unit)

    def _chosen(self, inspection: Inspection, indices: list[int]) -> list[Tensor]:
        whole = len(indices) == len(inspection.units)
        found = [inspection.matrices[str(i)] for i in range(len(self.moments) + 1)]
        return found if whole else [each[indices] for each in found]

    def _of(
        self, units: list[Unit], matrices: Sequence[Tensor], factors: Sequence[float]
    ) -> Updates:
        kept = [
            self._kept_share(units, moment, factor, matrices[0].device)
            for moment, factor in zip(self.moments, factors, strict=True)
        ]
        return Updates(units, matrices, kept)

    def _kept_share(
        self, units: list[Unit], moment: Moment, factor: float, device: torch.device
    ) -> Tensor:
        """`[units, 1, 1]`, what weight decay left of the weights in a step."""
        kept = []
        for unit in units:
            assigned = self.assign(unit)
            lr, decay = assigned.rule.rates(
                assigned.lr,
                assigned.weight_decay,
                on_spectral=bool(moment.on_spectral.get(unit.name, 1)),
            )
            kept.append(1 - lr * factor * decay)
        return torch.tensor(kept, dtype=torch.float64, device=device)[:, None, None]
