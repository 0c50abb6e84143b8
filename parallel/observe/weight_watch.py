"""Detection of weights that change between steps, for instance by bit flips in memory or in a
transfer, and of copies of weights that differ between ranks."""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import MAX, CommVolume, all_reduce_, found_by_any
from parallel.comm.groups import Axis
from parallel.model import ParallelModel, named_buffers
from parallel.optimizer.distributed_optimizer import DisagreementError, DistributedOptimizer
from parallel.storage.bucket_layout import Slot

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASHED = 1 << 22
"""Number of elements hashed at a time."""
SHOWN = 8
"""Largest number of findings in an error."""


def bit_hash(value: Tensor) -> Tensor:
    """Hash a tensor's bits to a 0-d int64 tensor.

    The hash is the sum, modulo 2^64, over elements of the element's bits times an odd number that
    depends on the position. Tensors that differ in exactly one element never have the same hash.
    """
    bits = value.detach().contiguous().view(-1).view(INTEGERS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, bits.numel(), HASHED):
        part = bits[start : start + HASHED].long()
        place = torch.arange(start, start + part.numel(), device=value.device)
        # Knuth's multiplier spreads neighbouring positions; the last bit makes the factor odd.
        total += (part * ((place * 6364136223846793005 + 1442695040888963407) | 1)).sum()
    return total


def check_replicas(model: ParallelModel) -> None:
    """Raise DisagreementError on every rank if copies on different ranks differ in any bit.

    The error names the parameters and buffers.
    """
    model.wait_for_weights()
    problems = []
    for part in model.domains:
        copied = {unit.parameter: model.parameters[unit.parameter] for unit in part.units}
        problems += different(copied, part.domain.replicas)
        whole = {unit.parameter for unit in part.units if unit.replicated}
        problems += different(
            {name: value for name, value in copied.items() if name in whole}, part.domain.tensor
        )
        tied = {u.name: copied[u.parameter] for u in part.units if u.tied_stage}
        problems += different(tied, part.domain.ends)
    problems += different(
        dict(named_buffers(model.chunks, model.parameters)), model.domains[0].domain.stage
    )
    differing = summary_of_all(problems)
    if differing:
        raise DisagreementError(f"copies of weights differ between ranks: {differing}")


def summary_of_all(findings: Iterable[str]) -> str:
    """Return the findings of all ranks in one line, or "" if there are none.

    All ranks must call this function together.
    """
    of_all = found_by_any(findings)
    more = f" and {len(of_all) - SHOWN} more" if len(of_all) > SHOWN else ""
    return ", ".join(of_all[:SHOWN]) + more


def different(tensors: Mapping[str, Tensor], axis: Axis | None) -> list[str]:
    """Return the names whose tensors differ between ranks of the axis."""
    if axis is None or axis.size == 1 or not tensors:
        return []
    hashes = torch.stack([bit_hash(value) for value in tensors.values()])
    # The complement reverses the order of all integers; the smallest integer has no negative.
    bounds = torch.stack([hashes, ~hashes])
    largest, turned = all_reduce_(bounds, axis, CommVolume(), "hashes of copies", MAX)
    same = (largest == ~turned).tolist()
    return [name for name, equal in zip(tensors, same, strict=True) if not equal]


CHUNK = 1 << 14
"""Number of elements per sum, which is the resolution of a finding."""


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
    """A part of a bucket of weights, as flat memory.

    slots   slots of all weights in the bucket
    first   position of the memory's first element in the bucket
    """

    kind: str
    flat: Tensor
    slots: Sequence[Slot]
    first: int = 0

    def names(self, same: Iterator[bool]) -> Iterator[str]:
        """Yield the weights with a changed chunk. `same` yields one flag per chunk."""
        last = self.first + self.flat.numel()
        for start in range(self.first, last, CHUNK):
            if next(same):
                continue
            end = min(start + CHUNK, last)
            for slot in self.slots:
                if slot.offset < end and start < slot.offset + slot.numel:
                    yield f"{self.kind} {slot.parameter}"


class WeightWatch:
    """Sums of the bits of all weights on one rank, computed after each step and compared before the
    next step.

    The sums include the parameters, this rank's master shards, and the weights of the matrices that
    this rank owns. Each step reads all these weights twice and waits for the new weights.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        """Watch the weights of `optimizer`, starting at the first `note`."""
        self.optimizer = optimizer
        self.sums: list[Tensor] = []
        self.changed: list[Tensor] = []

    @torch.no_grad()
    def note(self) -> None:
        """Record the sums of the weights, which must not change until the next update."""
        self.optimizer.model.wait_for_weights()
        self.sums = [chunk_sums(watched.flat) for watched in self._watched()]
        if not self.changed:
            self.changed = [torch.zeros_like(sums, dtype=torch.bool) for sums in self.sums]

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the weights with the sums of `note`, without waiting for the result.

        The first call, and the first call after `forget`, only record sums.
        """
        if not self.sums:
            self.note()
            return
        for watched, before, changed in zip(self._watched(), self.sums, self.changed, strict=True):
            changed |= chunk_sums(watched.flat) != before

    def forget(self) -> None:
        """Discard the recorded sums, for instance after loading a checkpoint."""
        self.sums, self.changed = [], []

    @torch.no_grad()
    def check(self) -> None:
        """Raise DisagreementError on every rank if weights have changed or copies differ on any
        rank.

        All ranks must call this method together. The method waits for the device. The error names
        ranks, hosts and weights.
        """
        self.compare()
        same = iter((~torch.cat(self.changed)).tolist())
        changed = dict.fromkeys(name for watched in self._watched() for name in watched.names(same))
        me = f"rank {dist.get_rank()} ({socket.gethostname()})"
        summary = summary_of_all(f"{me}: {name}" for name in changed)
        if summary:
            raise DisagreementError(
                f"weights have changed between steps: {summary}; earlier checkpoints are correct, "
                "but the memory of the named rank may be faulty"
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
