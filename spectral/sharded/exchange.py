"""The exchange: parts of cut matrices go to their owners, and results come back.

Each matrix has one owner among the ranks of a group. A packed all-to-all sends all parts of many
matrices to their owners, and another brings the results back. What a part is, and how elements are
sent, is the caller's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .copies import copy_all_


class Part(Protocol):
    """Part of a matrix that lies on one rank."""

    @property
    def rank(self) -> int:
        """The rank, within the group."""

    @property
    def numel(self) -> int:
        """Number of elements."""


class Transfer(Protocol):
    """The way of one matrix to its owner or back."""

    @property
    def owner(self) -> int:
        """The rank, within the group, that runs the matrix's rule."""


TransferType = TypeVar("TransferType", bound=Transfer)
PartType = TypeVar("PartType", bound=Part)

AllToAll = Callable[[Tensor, list[int], list[int]], Tensor]
"""Sends `[elements]`, given the numbers of elements to receive from and to send to each rank, and
returns what came, by ascending rank."""


class TransferPlan(Generic[TransferType, PartType]):
    """The parts that one rank sends and receives in one direction of the exchange.

    shard_side    (transfer, part) for every part that lies on this rank, owners ascending
    owner_side    (transfer, part) for every part of the matrices owned here, ranks ascending
    shard_counts  elements of the parts that lie here, by owner
    owner_counts  elements of the parts of the matrices owned here, by rank
    """

    def __init__(
        self,
        transfers: Sequence[TransferType],
        rank: int,
        size: int,
        parts_of: Callable[[TransferType], Iterable[PartType]],
    ) -> None:
        # Sender and receiver go through the parts of a pair of ranks in the same order.
        pairs = [(transfer, part) for transfer in transfers for part in parts_of(transfer)]
        self.shard_side = sorted(
            (pair for pair in pairs if pair[1].rank == rank), key=lambda pair: pair[0].owner
        )
        self.owner_side = sorted(
            (pair for pair in pairs if pair[0].owner == rank), key=lambda pair: pair[1].rank
        )
        self.shard_counts = elements_per_rank(
            size, ((transfer.owner, part.numel) for transfer, part in self.shard_side)
        )
        self.owner_counts = elements_per_rank(
            size, ((part.rank, part.numel) for _, part in self.owner_side)
        )


def elements_per_rank(size: int, parts: Iterable[tuple[int, int]]) -> list[int]:
    """Sum `(rank, elements)` by the `size` ranks of a group."""
    total = [0] * size
    for rank, numel in parts:
        total[rank] += numel
    return total


def packed(sources: Sequence[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Concatenate the elements of `sources` `[elements]`, in `dtype` or that of `like`.

    `like` gives the device, also if there are no sources.
    """
    sizes = [source.numel() for source in sources]
    buffer = like.new_empty(sum(sizes), dtype=dtype or like.dtype)
    flat = (source.reshape(-1) for source in sources)
    copy_all_(zip(buffer.split(sizes), flat, strict=True))
    return buffer


def unpacked(received: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """Cut `received` `[elements]` into parts of the shapes of `targets`, in their order."""
    parts = received.split([target.numel() for target in targets])
    return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
