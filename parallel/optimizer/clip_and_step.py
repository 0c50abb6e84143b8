"""Clipping, skip predicate and step of the distributed optimizer as one call.

On a GPU it may be one CUDA graph. NCCL's collectives can be recorded where all ranks record the
same ones, so every rank makes the same number of calls before it records. The recorded work waits
for everything that it starts, including the gathers of new weights.
"""

import torch
from torch import Tensor

from parallel.comm.collectives import CommVolume
from parallel.optimizer.optimizer import DistributedOptimizer, GradientNorm
from spectral.cuda_graph import CapturedCall
from spectral.rules.base import waiting_field


class Update:
    """One update of all weights: the gradients' norm, clipping, the predicate, and the step."""

    def __init__(self, optimizer: DistributedOptimizer, *, max_norm: float | None) -> None:
        """Prepare the update; `max_norm` as in `DistributedOptimizer.clip`."""
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.device = optimizer.domains[0].buffers.master.device

    def __call__(self, factor: float | Tensor, allowed: Tensor) -> tuple[GradientNorm, Tensor]:
        """Clip and step; returns the norm before clipping and a 0-d bool, whether it stepped.

        `factor` multiplies every unit's peak learning rate. Nothing changes unless `allowed`, 0-d
        bool, is True on all ranks and the norm is finite.
        """
        if not isinstance(factor, Tensor):  # in float32, so that a recorded step has equal rates
            factor = torch.full((), factor, device=self.device)
        norm = self.optimizer.clip(self.max_norm, allowed)
        self.optimizer.step(factor, norm.usable)
        return norm, norm.usable

    def release(self) -> None:
        """Free what the process groups must outlive."""


class CapturedUpdate(Update):
    """An update that is a CUDA graph from its third time on."""

    def __init__(self, optimizer: DistributedOptimizer, *, max_norm: float | None) -> None:
        """Prepare as `Update` does; raises ValueError if a step cannot be recorded."""
        check_capturable(optimizer)
        super().__init__(optimizer, max_norm=max_norm)
        # Written in place before each call, so that a recorded step reads the new values.
        self.factor = torch.ones((), device=self.device)
        self.allowed = torch.ones((), dtype=torch.bool, device=self.device)
        self._captured = CapturedCall(self._run, self.device)
        self._done: tuple[GradientNorm, Tensor] | None = None
        self._sent = CommVolume()  # by the recorded call, so by every replay

    def __call__(self, factor: float | Tensor, allowed: Tensor) -> tuple[GradientNorm, Tensor]:
        """Clip and step as `Update` does."""
        self.factor.fill_(factor)
        self.allowed.copy_(allowed)
        comm_volume = self.optimizer.model.comm_volume
        before = comm_volume.copy()
        if self._captured():
            self._sent = comm_volume - before
        else:
            comm_volume.update(self._sent)
        assert self._done is not None
        norm, active = self._done  # the next replay writes where this one did
        copied = GradientNorm(norm.total.clone(), norm.coefficient.clone(), active.clone())
        return copied, copied.usable

    def release(self) -> None:
        """Free the graph; must be called before the process groups that it uses are destroyed."""
        self._captured.release()

    def _run(self) -> None:
        self._done = super().__call__(self.factor, self.allowed)


def check_capturable(optimizer: DistributedOptimizer) -> None:
    """Raise ValueError naming what prevents a step from being recorded."""
    if optimizer.overlap_gather:
        raise ValueError(
            "overlap_gather must be False with cuda_graph, whose work ends with the step, got True"
        )
    for stack in optimizer.stacks:
        waits = waiting_field(stack.rule)
        if waits is not None:
            raise ValueError(
                f"{waits} of rule {stack.assigned.rule_name} must not be True "
                "with cuda_graph: it waits for the device"
            )
