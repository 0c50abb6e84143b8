"""An exchange that sends parts of matrices to their owners and sends the results back.

Each matrix has one owner among the ranks in a group. One packed all-to-all sends the parts of many
matrices to their owners, and another sends the results back. Matrices whose parts are all on the
owner are not sent. Parts are slices of buckets in the trainer, and boxes of DTensors in the
library.

In both cases, a step sends momenta to owners and updates back. In the trainer, owners keep and
update copies of the weights that are read by rules. In the library, other code may modify weights
between steps, so weights that are read by rules are sent to owners in every step.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batching import add_all_, copy_all_
from ..division import Box, narrowed, numel_of

AllToAll = Callable[[Tensor, list[int], list[int]], Tensor]
"""An all-to-all. Takes the elements to send `[elements]`, the number of elements to receive from
each rank, and the number of elements to send to each rank. Returns the received elements in rank
order."""


Held = Mapping[Any, Tensor] | Sequence[Tensor]
"""A rank's tensors that hold parts."""


@dataclass(frozen=True)
class Part:
    """A part of a matrix on one rank.

    rank     rank within the group
    tensor   key of the rank's tensor that holds the part
    inside   the part's box in that tensor; () for the whole tensor
    whole    the part's box in the matrix
    """

    rank: int
    tensor: Any
    inside: Box
    whole: Box

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel_of(self.whole)

    def of(self, held: Held) -> Tensor:
        """Return a view of the part in its tensor."""
        return narrowed(held[self.tensor], self.inside)


@dataclass(frozen=True)
class Transfer:
    """Transfer of a matrix to its owner, and of the result back.

    matrix    name of the matrix
    owner     the owner's rank within the group; the owner runs the matrix's rule
    sources   parts sent to the owner
    targets   parts to which the owner sends the result
    """

    matrix: Hashable
    owner: int
    sources: tuple[Part, ...]
    targets: tuple[Part, ...]

    @property
    def is_local(self) -> bool:
        """Whether all parts are on the owner, so nothing is sent."""
        return all(part.rank == self.owner for part in (*self.sources, *self.targets))


class Side:
    """The parts that a rank sends or receives in one direction of the exchange.

    local          (matrix, part) for every part of this rank's matrices with `Transfer.is_local`
    held           (matrix, part) for every other part on this rank, by ascending owner
    owned          (matrix, part) for every part of the other matrices owned by this rank, by
                   ascending rank
    held_counts    number of elements in `held` for each owner
    owned_counts   number of elements in `owned` for each rank
    """

    def __init__(self, ways: Sequence[tuple[Transfer, Part]], rank: int, size: int) -> None:
        """Sort the (transfer, part) pairs in `ways` into local, held and owned parts."""
        self.local = [(t.matrix, part) for t, part in ways if t.is_local and t.owner == rank]
        parts = [(t, part) for t, part in ways if not t.is_local]
        # Sender and receiver process the parts they have in common in the same order.
        held = [(t, part) for t, part in parts if part.rank == rank]
        owned = [(t, part) for t, part in parts if t.owner == rank]
        self.exists = bool(parts)
        self.held = [(t.matrix, part) for t, part in sorted(held, key=lambda way: way[0].owner)]
        self.owned = [(t.matrix, part) for t, part in sorted(owned, key=lambda way: way[1].rank)]
        self.held_counts, self.owned_counts = [0] * size, [0] * size
        for transfer, part in held:
            self.held_counts[transfer.owner] += part.numel
        for _, part in owned:
            self.owned_counts[part.rank] += part.numel


class Exchange:
    """The two all-to-alls for a set of matrices, planned once per rank.

    Each whole matrix is a tensor. A part contains the slice `part.whole` of this tensor.
    `owned_matrices` lists the names of the matrices owned by this rank.
    """

    def __init__(
        self,
        inward: Sequence[Transfer],
        outward: Sequence[Transfer],
        rank: int,
        size: int,
        gather_by: AllToAll,
        scatter_by: AllToAll,
    ) -> None:
        """Plan how to gather the sources in `inward` and scatter to the targets in `outward`.

        `gather_by` sends parts to owners, and `scatter_by` sends results back.
        """
        self.gather_by, self.scatter_by = gather_by, scatter_by
        self.inward = Side([(t, part) for t in inward for part in t.sources], rank, size)
        self.outward = Side([(t, part) for t in outward for part in t.targets], rank, size)
        self.owned_matrices: list[Any] = [t.matrix for t in inward if t.owner == rank]

    def gather(
        self,
        held: Held,
        whole: Mapping[Any, Tensor],
        like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy the parts of each matrix to `whole[matrix]` on its owner.

        Local matrices missing from `whole` are skipped. Elements are sent in `dtype` (None: the
        dtype of `like`), on the device of `like`.
        """
        side = self.inward
        copy_all_(local_pairs([pair for pair in side.local if pair[0] in whole], whole, held))
        if side.exists:
            send = packed([part.of(held) for _, part in side.held], like, dtype)
            received = self.gather_by(send, side.owned_counts, side.held_counts)
            targets = [narrowed(whole[matrix], part.whole) for matrix, part in side.owned]
            copy_all_(zip(targets, unpacked(received, targets), strict=True))

    def scatter(
        self,
        whole: Mapping[Any, Tensor],
        held: Held,
        like: Tensor,
        dtype: torch.dtype | None = None,
        *,
        add: bool = False,
        local: bool = True,
    ) -> None:
        """Copy `whole[matrix]` from its owner to all parts of the matrix.

        With `add`, add to the parts instead of overwriting them. If `local` is False, matrices that
        need no transfer are skipped. See `gather` for `like` and `dtype`.
        """
        write = add_all_ if add else copy_all_
        if local:
            pairs = local_pairs(self.outward.local, whole, held)
            write((target, part) for part, target in pairs)
        targets, received = self.receive(whole, held, like, dtype)
        if add and targets:
            received = received.to(targets[0].dtype)
        write(zip(targets, unpacked(received, targets), strict=True))

    def receive(
        self,
        whole: Mapping[Any, Tensor],
        held: Held,
        like: Tensor,
        dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Send `whole[matrix]` from its owner to the ranks that hold parts of the matrix.

        Returns views of this rank's parts, and the elements received for them. See `gather` for
        `like` and `dtype`.
        """
        side = self.outward
        if not side.exists:
            return [], like.new_empty(0)
        sources = [narrowed(whole[matrix], part.whole) for matrix, part in side.owned]
        send = packed(sources, like, dtype)
        received = self.scatter_by(send, side.held_counts, side.owned_counts)
        return [part.of(held) for _, part in side.held], received


def local_pairs(
    parts: Iterable[tuple[Hashable, Part]], whole: Mapping[Any, Tensor], held: Held
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield equally shaped views of each local part in `whole` and in `held`."""
    for matrix, part in parts:
        view = part.of(held)
        yield narrowed(whole[matrix], part.whole).view(view.shape), view


def packed(sources: Sequence[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Flatten and concatenate `sources` into `[elements]`, in `dtype` or the dtype of `like`.

    The result is on the device of `like`, even if there are no sources.
    """
    sizes = [source.numel() for source in sources]
    buffer = like.new_empty(sum(sizes), dtype=dtype or like.dtype)
    flat = (source.reshape(-1) for source in sources)
    copy_all_(zip(buffer.split(sizes), flat, strict=True))
    return buffer


def unpacked(received: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """Split `received` `[elements]` into tensors shaped like `targets`, in the same order."""
    parts = received.split([target.numel() for target in targets])
    return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
