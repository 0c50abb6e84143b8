"""Detects weights that change between steps, e.g. through bit flips in memory or in transit. Also
detects replicated weights that differ across ranks."""

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
"""Maximum number of findings listed in an error."""


def bit_hash(value: Tensor) -> Tensor:
    """Hash the bits of a tensor to a 0-d int64 tensor.

    Each element's bits are multiplied by an odd number that is derived from the element's position.
    The hash is the sum of these products modulo 2^64. Tensors that differ in exactly one element
    never have the same hash.
    """
    bits = value.detach().contiguous().view(-1).view(INTEGERS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, bits.numel(), HASHED):
        part = bits[start : start + HASHED].long()
        position = torch.arange(start, start + part.numel(), device=value.device)
        # Knuth's multiplier spreads out neighbouring positions; setting the last bit makes the
        # factor odd.
        total += (part * ((position * 6364136223846793005 + 1442695040888963407) | 1)).sum()
    return total


def check_replicas(model: ParallelModel) -> None:
    """Raise DisagreementError on every rank if replicated weights are not bitwise equal.

    The error names the parameters and buffers that differ.
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
    """Return a one-line summary of the findings of all ranks, or "" if there are none.

    Collective: all ranks must call this function.
    """
    of_all = found_by_any(findings)
    more = f" and {len(of_all) - SHOWN} more" if len(of_all) > SHOWN else ""
    return ", ".join(of_all[:SHOWN]) + more


def different(tensors: Mapping[str, Tensor], axis: Axis | None) -> list[str]:
    """Return the names of tensors that differ across the ranks of an axis."""
    if axis is None or axis.size == 1 or not tensors:
        return []
    hashes = torch.stack([bit_hash(value) for value in tensors.values()])
    # Get the minimum as the complement of a maximum of complements. Negation would not work,
    # because the smallest integer cannot be negated.
    bounds = torch.stack([hashes, ~hashes])
    largest, turned = all_reduce_(bounds, axis, CommVolume(), "hashes of copies", MAX)
    same = (largest == ~turned).tolist()
    return [name for name, equal in zip(tensors, same, strict=True) if not equal]


CHUNK = 1 << 14
"""Number of elements per checksum: the granularity at which changes are located."""


def chunk_sums(flat: Tensor) -> Tensor:
    """Return the sum of the elements' bits for each chunk of `CHUNK` elements of `flat` `[numel]`.

    The sums are int64 `[ceil(numel / CHUNK)]`, modulo 2^64, so a single bit flip always changes a
    sum.
    """
    bits = flat.detach().view(INTEGERS[flat.element_size()])
    whole = bits.numel() // CHUNK * CHUNK
    sums = bits[:whole].view(-1, CHUNK).sum(1, dtype=torch.int64)
    if whole == bits.numel():
        return sums
    return torch.cat([sums, bits[whole:].sum(dtype=torch.int64)[None]])


@dataclass(frozen=True)
class _Watched:
    """A contiguous part of a weight bucket.

    slots   slots of all weights in the bucket
    first   offset in the bucket of the first element of `flat`
    """

    kind: str
    flat: Tensor
    slots: Sequence[Slot]
    first: int = 0

    def names(self, same: Iterator[bool]) -> Iterator[str]:
        """Yield the names of weights that overlap a changed chunk. `same` yields, for each chunk,
        whether the chunk is unchanged."""
        last = self.first + self.flat.numel()
        for start in range(self.first, last, CHUNK):
            if next(same):
                continue
            end = min(start + CHUNK, last)
            for slot in self.slots:
                if slot.offset < end and start < slot.offset + slot.numel:
                    yield f"{self.kind} {slot.parameter}"


class WeightWatch:
    """Checksums of all weights on one rank, computed after each step and verified before the next.

    The checksums cover the parameters, this rank's master shards, and the weights of the matrices
    that this rank owns. Each step reads all of these weights twice and waits for the new weights.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        """Watch the weights of `optimizer`, starting at the first call of `note`."""
        self.optimizer = optimizer
        self.sums: list[Tensor] = []
        self.changed: list[Tensor] = []

    @torch.no_grad()
    def note(self) -> None:
        """Record the checksums of the weights, which must not change until the next update."""
        self.optimizer.model.wait_for_weights()
        self.sums = [chunk_sums(watched.flat) for watched in self._watched()]
        if not self.changed:
            self.changed = [torch.zeros_like(sums, dtype=torch.bool) for sums in self.sums]

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the weights with the checksums recorded by `note`, without a host sync.

        The first call, and the first call after `forget`, only record checksums.
        """
        if not self.sums:
            self.note()
            return
        for watched, before, changed in zip(self._watched(), self.sums, self.changed, strict=True):
            changed |= chunk_sums(watched.flat) != before

    def forget(self) -> None:
        """Discard the recorded checksums, e.g. after loading a checkpoint."""
        self.sums, self.changed = [], []

    @torch.no_grad()
    def check(self) -> None:
        """Raise DisagreementError on every rank if weights have changed or copies differ on any
        rank.

        The error names ranks, hosts and weights. Collective: all ranks must call this method.
        Causes a host sync.
        """
        self.compare()
        same = iter((~torch.cat(self.changed)).tolist())
        changed = dict.fromkeys(name for watched in self._watched() for name in watched.names(same))
        me = f"rank {dist.get_rank()} ({socket.gethostname()})"
        summary = summary_of_all(f"{me}: {name}" for name in changed)
        if summary:
            raise DisagreementError(
                f"weights were modified outside optimizer steps: {summary}; earlier checkpoints "
                "are correct, but the memory of the named rank may be faulty"
            )
        check_replicas(self.optimizer.model)

    def _watched(self) -> Iterator[_Watched]:
        for part in self.optimizer.model.domains:
            for bucket, flat, master in zip(
                part.bucket_layout.buckets, part.parameters, part.masters, strict=True
            ):
                yield _Watched("parameter", flat, bucket.slots)
                if master.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                    first = part.domain.replicas.rank * master.numel()
                    yield _Watched("master", master, bucket.slots, first)
        for domain in self.optimizer.domains:
            for group in domain.step_groups:
                for name, weight in group.kept.items():
                    yield _Watched("owner's", weight.view(-1), [Slot(name, 0, weight.numel())])
                for stack in group.materialized.stacks:
                    size = stack.weight[0].numel()
                    slots = [Slot(u.name, i * size, size) for i, u in enumerate(stack.units)]
                    yield _Watched("owner's", stack.weight.view(-1), slots)
