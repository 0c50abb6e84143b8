"""Finds weights that change while nobody steps them: bits that memory or a copy has flipped."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.observe.replicas import INTEGERS, check_replicas, found_by_all
from parallel.optimizer.build import DisagreementError
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.storage.bucket_layout import Slot

CHUNK = 1 << 14
"""Elements under one sum: what is found is known to this many elements."""


def chunk_sums(flat: Tensor) -> Tensor:
    """Sum the bits of each `CHUNK` elements of `flat` `[numel]` to int64 `[ceil(numel / CHUNK)]`.

    The sum is modulo 2^64, so one flipped bit always changes it.
    """
    bits = flat.detach().view(INTEGERS[flat.element_size()])
    whole = bits.numel() // CHUNK * CHUNK
    sums = bits[:whole].view(-1, CHUNK).sum(1, dtype=torch.int64)
    if whole == bits.numel():
        return sums
    return torch.cat([sums, bits[whole:].sum(dtype=torch.int64)[None]])


@dataclass(frozen=True)
class _Watched:
    """Flat memory of weights.

    slots   of the weights, as they lie in the bucket of which this memory is a part
    first   element of the bucket with which this memory begins
    """

    kind: str
    flat: Tensor
    slots: Sequence[Slot]
    first: int = 0

    def names(self, same: Iterator[bool]) -> Iterator[str]:
        """Yield the weights of which a chunk is not the same; takes a flag of each chunk."""
        last = self.first + self.flat.numel()
        for start in range(self.first, last, CHUNK):
            if next(same):
                continue
            end = min(start + CHUNK, last)
            for slot in self.slots:
                if slot.offset < end and start < slot.offset + slot.numel:
                    yield f"{self.kind} {slot.parameter}"


class WeightWatch:
    """Sums of all weights of one rank, taken after each step and compared before the next.

    Covered are the parameters, this rank's shards of the masters, and the weights that owners of
    matrices keep. Each step reads them twice, and ends when its new weights have arrived.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        """Watch the weights that `optimizer` steps, from the first `note` on."""
        self.optimizer = optimizer
        self.sums: list[Tensor] = []
        self.changed: list[Tensor] = []

    @torch.no_grad()
    def note(self) -> None:
        """Take the sums that must hold until the next update."""
        self.optimizer.model.wait_for_weights()
        self.sums = [chunk_sums(watched.flat) for watched in self._watched()]
        if not self.changed:
            self.changed = [torch.zeros_like(sums, dtype=torch.bool) for sums in self.sums]

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the weights with the sums of `note`, without a result on the host.

        The first call, and the first after `forget`, only take sums.
        """
        if not self.sums:
            self.note()
            return
        for watched, before, changed in zip(self._watched(), self.sums, self.changed, strict=True):
            changed |= chunk_sums(watched.flat) != before

    def forget(self) -> None:
        """Take the next weights as they are, for instance those of a checkpoint."""
        self.sums, self.changed = [], []

    @torch.no_grad()
    def check(self) -> None:
        """Raise DisagreementError on every rank if weights have changed, or copies differ, on any.

        Collective, and waits for the device. The error names ranks, hosts and weights.
        """
        self.compare()
        same = iter((~torch.cat(self.changed)).tolist())
        mine = dict.fromkeys(name for watched in self._watched() for name in watched.names(same))
        me = f"rank {dist.get_rank()} ({socket.gethostname()})"
        found = found_by_all(f"{me}: {name}" for name in mine)
        if found:
            raise DisagreementError(
                f"weights have changed between steps: {found}; the checkpoints before are sound, "
                "the memory of that rank may not be"
            )
        check_replicas(self.optimizer.model)

    def _watched(self) -> Iterator[_Watched]:
        for part in self.optimizer.model.domains:
            buffers = part.buffers
            for bucket, flat, master in zip(
                buffers.bucket_layout.buckets, buffers.parameters, buffers.masters, strict=True
            ):
                yield _Watched("parameter", flat, bucket.slots)
                if master.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                    first = buffers.replicas.rank * master.numel()
                    yield _Watched("master", master, bucket.slots, first)
        for domain in self.optimizer.domains:
            for group in domain.step_groups:
                for name, weight in group.kept.items():
                    yield _Watched("owner's", weight.view(-1), [Slot(name, 0, weight.numel())])
                for stack in group.materialized.stacks:
                    size = stack.weight[0].numel()
                    slots = [Slot(u.name, i * size, size) for i, u in enumerate(stack.units)]
                    yield _Watched("owner's", stack.weight.view(-1), slots)
