"""Checks that ranks that must hold the same weights do, by hashes compared over the copies."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from parallel.comm.collectives import MAX, CommVolume, all_reduce_, from_all
from parallel.comm.groups import Axis
from parallel.model import ParallelModel
from parallel.optimizer.build import DisagreementError
from parallel.storage.parameter_names import named_buffers

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements hashed at once."""
SHOWN = 8
"""Findings that an error lists."""


def bit_hash(value: Tensor) -> Tensor:
    """Hash a tensor's bits to a 0-d int64 tensor.

    The hash is the sum modulo 2^64 of each element's bits times an odd number that depends on its
    place. Tensors that differ in exactly one element never have the same hash.
    """
    bits = value.detach().contiguous().view(-1).view(INTEGERS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        place = torch.arange(start, start + part.numel(), device=value.device)
        # Knuth's multiplier spreads neighbouring places; the last bit makes the factor odd.
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
    problems += different(
        dict(named_buffers(model.chunks, model.parameters)), model.domains[0].domain.stage
    )
    found = found_by_all(problems)
    if found:
        raise DisagreementError(f"copies differ between ranks: {found}")


def found_by_all(mine: Iterable[str]) -> str:
    """Return what any rank has found, in one line, empty if nothing. Collective."""
    found = list(dict.fromkeys(text for texts in from_all(list(mine)) for text in texts))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def different(tensors: Mapping[str, Tensor], axis: Axis) -> list[str]:
    """Return the names whose tensors differ between ranks of the axis."""
    if axis.size == 1 or not tensors:
        return []
    mine = torch.stack([bit_hash(value) for value in tensors.values()])
    # The complement reverses the order, also of the smallest integer, which has no negative.
    bounds = torch.stack([mine, ~mine])
    largest, turned = all_reduce_(bounds, axis, CommVolume(), "hashes of copies", MAX)
    same = (largest == ~turned).tolist()
    return [name for name, equal in zip(tensors, same, strict=True) if not equal]
