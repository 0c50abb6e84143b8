"""Two other ways to distribute an optimizer over data-parallel ranks, for comparison.

Replicated   gradients are all-reduced, every rank keeps all state and steps everything
LayerWise    the scheme of megatron-core 0.16.1's `LayerWiseDistributedOptimizer`: gradients are
             all-reduced, whole parameters are dealt to ranks by ping-pong on element counts, each
             owner steps its own, then one uneven all-gather of the flattened parameters

Both step with the rules of `spectral.rules`, on masters in float32, with units of equal shape as
one stack, as `parallel` does, so that a comparison is about the distribution alone (megatron-core
steps one matrix at a time). They support neither tensor or pipeline parallelism nor experts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume
from parallel.comm.groups import Axis
from parallel.optimizer.routing import Assign, Assignment
from parallel.storage.grouping import bucket_parameters, units_by_parameter
from spectral.rules import State
from spectral.sharded.placement import ping_pong


@dataclass
class Batch:
    """Units of one shape and assignment: masters `[units, *shape]` and state."""

    units: list[Unit]
    assigned: Assignment
    masters: Tensor
    state: State


class Replicated:
    """Every rank steps everything.

    parameters   `[*shape]` by name, in the model's dtype; copies of those given
    gradients    `[*shape]` by name, float32 or wider, views of flat buckets, to be filled with this
                 rank's gradients before `update`
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], units: Sequence[Unit], assign: Assign, axis: Axis
    ) -> None:
        """`units` are those of the whole model in forward order, `axis` the data-parallel ranks."""
        self.axis = axis
        self.comm_volume = CommVolume()
        self.parameters = {name: p.detach().clone() for name, p in parameters.items()}
        self.buckets, self.gradients = gradient_buckets(self.parameters, units)
        self.owned = self.deal(units)
        self.batches = stacked(
            [unit for unit in units if unit.parameter in self.owned[axis.rank]],
            self.parameters,
            assign,
        )

    def deal(self, units: Sequence[Unit]) -> list[list[str]]:
        """Names of the parameters that each rank steps."""
        return [list(self.parameters)] * self.axis.size

    @torch.no_grad()
    def update(self) -> None:
        """Reduce the gradients, step, and wait for all new weights."""
        self.reduce()
        for batch in self.batches:
            batch.assigned.rule.step(
                batch.masters,
                torch.stack([matrix(unit, self.gradients) for unit in batch.units]),
                batch.state,
                lr=batch.assigned.lr,
                weight_decay=batch.assigned.weight_decay,
            )
            for unit, master in zip(batch.units, batch.masters, strict=True):
                part = unit.view(self.parameters[unit.parameter])
                part.copy_(master.view(part.shape))
        self.gather()

    def reduce(self) -> None:
        """Replace every gradient by its mean over ranks."""
        works = []
        for flat in self.buckets:
            self.comm_volume.add(
                "all-reduce", 2 * flat.nbytes * (self.axis.size - 1) / self.axis.size
            )
            works.append(dist.all_reduce(flat, group=self.axis.group, async_op=True))
        for flat, work in zip(self.buckets, works, strict=True):
            work.wait()
            flat.div_(self.axis.size)

    def gather(self) -> None:
        """Do nothing: every rank has stepped everything."""

    def memory(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps."""
        state = [t for batch in self.batches for t in (batch.masters, *batch.state.values())]
        return {
            "weights": total_bytes(self.parameters.values()),
            "gradients": total_bytes(self.buckets),
            "masters and state": total_bytes(state),
        }


class LayerWise(Replicated):
    """Each whole parameter has an owner that steps it."""

    def deal(self, units: Sequence[Unit]) -> list[list[str]]:
        """Names of the parameters that each rank steps, whatever their rule."""
        names = list(units_by_parameter(units))
        owners = ping_pong([self.parameters[name].numel() for name in names], self.axis.size)
        dealt: list[list[str]] = [[] for _ in range(self.axis.size)]
        for name, owner in zip(names, owners, strict=True):
            dealt[owner].append(name)
        return dealt

    def gather(self) -> None:
        """Get the parameters of all owners.

        Like PyTorch's NCCL backend for unequal sizes, it starts one broadcast per rank (gloo has no
        such all-gather). Traffic is that of a ring: a rank passes on every rank's part but that of
        its successor.
        """
        flats = [self.flattened(rank) for rank in range(self.axis.size)]
        successor = flats[(self.axis.rank + 1) % self.axis.size]
        self.comm_volume.add("uneven all-gather", total_bytes(flats) - successor.nbytes)
        works = [
            dist.broadcast(flat, group_src=rank, group=self.axis.group, async_op=True)
            for rank, flat in enumerate(flats)
            if flat.numel()
        ]
        for work in works:
            work.wait()
        for rank, flat in enumerate(flats):
            if rank != self.axis.rank:
                self.unflatten(rank, flat)

    def flattened(self, rank: int) -> Tensor:
        """`[elements]`: this rank's parameters, or room for those of another."""
        mine = [self.parameters[name].flatten() for name in self.owned[rank]]
        some = next(iter(self.parameters.values()))
        if rank == self.axis.rank:
            return torch.cat([some.new_empty(0), *mine])
        return some.new_empty(sum(p.numel() for p in mine))

    def unflatten(self, rank: int, flat: Tensor) -> None:
        """Copy what `rank` sent to the parameters."""
        targets = [self.parameters[name] for name in self.owned[rank]]
        parts = flat.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))


def gradient_buckets(
    parameters: Mapping[str, Tensor], units: Sequence[Unit]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Flat buckets of gradients, grouped as `parallel` groups them, and each parameter's view."""
    buckets, views = [], {}
    for names in bucket_parameters(units, None, join_layers=False):
        sizes = [parameters[name].numel() for name in names]
        some = parameters[names[0]]
        dtype = torch.promote_types(some.dtype, torch.float32)
        flat = torch.zeros(sum(sizes), dtype=dtype, device=some.device)
        buckets.append(flat)
        for name, part in zip(names, flat.split(sizes), strict=True):
            views[name] = part.view(parameters[name].shape)
    return buckets, views


def stacked(units: Sequence[Unit], parameters: Mapping[str, Tensor], assign: Assign) -> list[Batch]:
    """Batches of units of equal shape and assignment, with masters and new state."""
    groups: dict[tuple[Assignment, tuple[int, ...]], list[Unit]] = {}
    for unit in units:
        groups.setdefault((assign(unit), unit.shape), []).append(unit)
    batches = []
    for (assigned, _), members in groups.items():
        weights = torch.stack([matrix(unit, parameters) for unit in members])
        masters = weights.to(torch.promote_types(weights.dtype, torch.float32))
        batches.append(Batch(members, assigned, masters, assigned.rule.init_state(masters)))
    return batches


def matrix(unit: Unit, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a unit's part of its parameter's tensor, `[*shape]`; a copy of scattered rows."""
    return unit.view(tensors[unit.parameter]).reshape(unit.shape)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)
