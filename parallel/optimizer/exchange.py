"""Brings cut matrices to their owners and takes the updates back.

A matrix may be cut twice: by tensor parallelism, and by the border of a data-parallel shard. Each
has one owner among the ranks of its pipeline stage. One packed all-to-all carries the pieces of the
momentum to the owners, one carries the updates back; the weights need no transfer over
data-parallel ranks, which all hold them, only over tensor-parallel ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import Traffic, all_to_all
from parallel.comm.groups import Axis
from parallel.storage.bucket_layout import BucketLayout, Span


@dataclass(frozen=True)
class ShardPart:
    """The spans of one unit's flattened local piece that one rank of the stage owns."""

    rank: int  # within the stage: tensor rank + tensor size * data rank
    tensor_rank: int
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """Elements of all spans."""
        return sum(span.length for span in self.spans)


TensorMode = Literal["owner", "duplicated", "shardwise"]
"""Who steps a matrix that tensor parallelism cuts: one owner; every tensor-parallel rank, for
comparison; or each rank its own piece as a matrix by itself, which is other mathematics."""


@dataclass(frozen=True)
class UnitTransfer:
    """One unit, where its pieces lie and where it is stepped. The same on every rank of the stage.

    sources   tensor-parallel ranks whose pieces make up the unit: all if it is cut shard_parts
    whose momentum comes to the owner returns   whose weights the owner's update goes to: the
    shard_parts, but for a duplicated unit, and for a replicated one, whose copies all take the
    update of the owner's own"""

    unit: Unit
    owner: int
    sources: tuple[int, ...]
    shard_parts: tuple[ShardPart, ...]
    returns: tuple[ShardPart, ...]

    @property
    def pieces(self) -> int:
        """Number of tensor-parallel pieces of the whole unit."""
        return len(self.sources)

    @property
    def is_local(self) -> bool:
        """Whether its owner owns all of it, so that nothing travels."""
        alone = len(self.shard_parts) == 1 and self.shard_parts[0].rank == self.owner
        return alone and self.returns == self.shard_parts

    def row(self, tensor_rank: int) -> int:
        """Which piece of the whole unit a tensor-parallel rank has."""
        return self.sources.index(tensor_rank) if self.pieces > 1 else 0


def plan_transfers(
    stage_units: Sequence[Sequence[Unit]],
    layout: BucketLayout,
    owners: Mapping[str, int],
    mode: TensorMode = "owner",
) -> list[UnitTransfer]:
    """The transfer of every unit that has an owner.

    `stage_units` are the units of each tensor-parallel rank of the stage, in order of rank.
    """
    tensor_size = len(stage_units)
    transfers = []
    for own, units in enumerate(stage_units):
        for unit in units:
            cut = unit.shard_axis is not None
            if unit.name not in owners or (own > 0 and (cut or unit.replicated)):
                continue
            owner = owners[unit.name]
            everywhere = tuple(range(tensor_size))

            def held(ranks: tuple[int, ...], unit: Unit = unit) -> tuple[ShardPart, ...]:
                return tuple(
                    ShardPart(data * tensor_size + rank, rank, layout.shard_spans(unit, data))
                    for data in layout.holders(unit)
                    for rank in ranks
                )

            if unit.replicated:
                mine = (owner % tensor_size,)
                transfers.append(UnitTransfer(unit, owner, mine, held(mine), held(everywhere)))
            elif cut and mode == "duplicated":
                beside = owner - owner % tensor_size
                transfers += [
                    UnitTransfer(unit, beside + rank, everywhere, held(everywhere), held((rank,)))
                    for rank in everywhere
                ]
            else:
                sources = everywhere if cut else (own,)
                transfers.append(UnitTransfer(unit, owner, sources, held(sources), held(sources)))
    return transfers


def shardwise(
    stage_units: Sequence[Sequence[Unit]], matrix: Callable[[Unit], bool]
) -> list[list[Unit]]:
    """The units with each tensor-parallel piece of a cut `matrix` as a matrix of its own."""
    size = len(stage_units)
    return [
        [
            replace(
                unit, name=f"{unit.name}.shard.{rank}", axes=unit.local_axes(size), shard_axis=None
            )
            if unit.shard_axis is not None and matrix(unit)
            else unit
            for unit in units
        ]
        for rank, units in enumerate(stage_units)
    ]


class TransferPlan:
    """The shard_parts that travel between owners and owners in one direction, as one rank sees
    them.

    shard_side   (transfer, shard_part) of this rank's own shard_parts, owners ascending
    owner_side   (transfer, shard_part) of what this rank owners, owners ascending
    """

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        stage: Axis,
        shard_parts: Callable[[UnitTransfer], tuple[ShardPart, ...]],
    ) -> None:
        # Both ends go through the shard_parts of a pair of ranks in the same order.
        pairs = [(transfer, held) for transfer in transfers for held in shard_parts(transfer)]
        self.shard_side = sorted(
            (pair for pair in pairs if pair[1].rank == stage.rank), key=lambda pair: pair[0].owner
        )
        self.owner_side = sorted(
            (pair for pair in pairs if pair[0].owner == stage.rank), key=lambda pair: pair[1].rank
        )
        self.shard_counts = counts(stage, ((j.owner, h.numel) for j, h in self.shard_side))
        self.owner_counts = counts(stage, ((h.rank, h.numel) for _, h in self.owner_side))

    def spans(self) -> list[Span]:
        """This rank's own spans, in moved order."""
        return [span for _, held in self.shard_side for span in held.spans]

    def places(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Where the spans of the shard_parts owned here lie in their units, in moved order."""
        return [
            whole[transfer.unit.name][transfer.row(held.tensor_rank)].narrow(
                0, span.piece_start, span.length
            )
            for transfer, held in self.owner_side
            for span in held.spans
        ]


def counts(axis: Axis, parts: Iterable[tuple[int, int]]) -> list[int]:
    """Elements per rank of an axis, from (rank, elements) of every traveller."""
    total = [0] * axis.size
    for rank, numel in parts:
        total[rank] += numel
    return total


class Exchange:
    """The two all-to-alls of one group of moved units, planned once, for one rank."""

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        stage: Axis,
        wire: torch.dtype | None,
        *,
        kind: str = "exchange",
    ) -> None:
        """`wire` is the dtype in which momentum and updates travel, None for the arrays' own; their
        bytes are counted as `kind` in and `kind` out."""
        self.stage = stage
        self.wire = wire
        self.kind = kind
        self.transfers = [transfer for transfer in transfers if not transfer.is_local]
        self.inward = TransferPlan(self.transfers, stage, lambda transfer: transfer.shard_parts)
        self.outward = TransferPlan(self.transfers, stage, lambda transfer: transfer.returns)

    def gather_to_owner(
        self, piece: Callable[[Span], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """Copy every span `piece(span)` to its place in `whole[name]`
        `[pieces, local elements]` at the unit's owner. `like` gives dtype and device."""
        if not self.transfers:
            return
        way = self.inward
        received = self._all_to_all(
            [piece(span) for span in way.spans()], way.owner_counts, way.shard_counts, like,
            traffic, "in", self.wire,
        )  # fmt: skip
        targets = way.places(whole)
        parts = received.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def scatter_from_owner(
        self, whole: Mapping[str, Tensor], piece: Callable[[Span], Tensor], like: Tensor,
        traffic: Traffic, *, replace: bool = False,
    ) -> None:  # fmt: skip
        """Add every span of `whole[name]` `[pieces, local elements]` at the owners to
        `piece(span)` at the span's owner. `like` gives dtype and device. With `replace` it takes
        the place of `piece(span)`, and travels in the dtype of `like`."""
        if not self.transfers:
            return
        way = self.outward
        received = self._all_to_all(
            way.places(whole), way.shard_counts, way.owner_counts, like,
            traffic, "out", like.dtype if replace else self.wire,
        )  # fmt: skip
        targets = [piece(span) for span in way.spans()]
        parts = received.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            if replace:
                target.copy_(part)
            else:
                target.add_(part)

    def _all_to_all(
        self, sources: list[Tensor], in_counts: list[int], out_counts: list[int], like: Tensor,
        traffic: Traffic, direction: str, wire: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        """What the other ranks sent here of their `sources`, one after the other."""
        send = torch.cat([like.new_empty(0), *sources]).to(wire or like.dtype)
        kind = f"{self.kind} {direction}"
        return all_to_all(send, in_counts, out_counts, self.stage, traffic, kind)


class WeightExchange:
    """Brings weights to owners that do not have them.

    Every data-parallel rank holds its tensor rank's parameters in full, so an owner lacks only what
    other tensor-parallel ranks have, and hears from those beside it.
    """

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        tensor: Axis,
        data_rank: int,
        *,
        kind: str = "exchange weights",
    ) -> None:
        """Their bytes are counted as `kind`."""
        self.tensor = tensor
        self.data_rank = data_rank
        self.kind = kind
        moved = [
            transfer
            for transfer in transfers
            if transfer.owner // tensor.size == data_rank
            and transfer.sources != (transfer.owner % tensor.size,)
        ]
        self.outgoing = [
            transfer
            for rank in range(tensor.size)
            for transfer in moved
            if transfer.owner % tensor.size == rank and tensor.rank in transfer.sources
        ]
        self.incoming = [
            (source, transfer)
            for source in range(tensor.size)
            for transfer in moved
            if transfer.owner % tensor.size == tensor.rank and source in transfer.sources
        ]
        self.out_counts = counts(
            tensor, ((j.owner % tensor.size, local_numel(j)) for j in self.outgoing)
        )
        self.in_counts = counts(tensor, ((source, local_numel(j)) for source, j in self.incoming))

    def gather_to_owner(
        self, local: Callable[[Unit], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """Fill `whole[name]` `[pieces, local elements]` of every unit owned here that lacks
        a piece from each rank's `local(unit)`. `like` gives dtype and device."""
        if self.tensor.size == 1:
            return
        send = torch.cat([like.new_empty(0), *(local(j.unit).flatten() for j in self.outgoing)])
        received = all_to_all(
            send, self.in_counts, self.out_counts, self.tensor, traffic, self.kind
        )
        parts = received.split([local_numel(transfer) for _, transfer in self.incoming])
        for (source, transfer), part in zip(self.incoming, parts, strict=True):
            whole[transfer.unit.name][transfer.row(source)].copy_(part)


def local_numel(transfer: UnitTransfer) -> int:
    """Elements of one tensor-parallel piece of a unit."""
    return transfer.unit.numel // transfer.pieces


def assemble(transfer: UnitTransfer, pieces: Tensor) -> Tensor:
    """The whole matrix `[rows, cols]` of a unit's pieces `[pieces, local elements]`."""
    unit = transfer.unit
    local = pieces.view(transfer.pieces, *unit.local_axes(transfer.pieces))
    if transfer.pieces == 1:
        return local.view(unit.shape)
    assert unit.shard_axis is not None  # a unit in pieces is cut along one
    # [pieces, ..., axis / pieces, ...] -> [..., axis, ...]
    return torch.cat(list(local), dim=unit.shard_axis).view(unit.shape)


def disassemble_(transfer: UnitTransfer, whole: Tensor, pieces: Tensor) -> None:
    """None; the inverse of `assemble`, into `pieces`."""
    for row in range(transfer.pieces):
        pieces[row].copy_(transfer.unit.piece(whole, row, transfer.pieces).flatten())
