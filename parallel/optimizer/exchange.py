"""The exchange: pieces of cut matrices go to their owners, and results come back.

A matrix may be cut twice: by tensor parallelism, and by the border of a data-parallel shard. Each
matrix has one owner among the ranks of its pipeline stage. One packed all-to-all sends the pieces
of the momentum to the owners, another sends the updates back. Weights are not exchanged between
data-parallel ranks, which all hold them, only between tensor-parallel ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume, all_to_all
from parallel.comm.groups import Axis
from parallel.storage.bucket_layout import BucketLayout, Span
from spectral.sharded.copies import add_all_, copy_all_
from spectral.sharded.exchange import TransferPlan as Plan
from spectral.sharded.exchange import elements_per_rank, packed, unpacked


@dataclass(frozen=True)
class ShardPart:
    """The spans of one unit's flattened local piece that lie in the shard of one rank."""

    rank: int  # within the stage: tensor rank + tensor size * data rank
    tensor_rank: int
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """Elements of all spans."""
        return sum(span.length for span in self.spans)


TensorMode = Literal["owner", "shardwise"]
"""Who steps a matrix that tensor parallelism cuts: its one owner, or each rank its own piece as a
matrix of its own, which is different mathematics."""


@dataclass(frozen=True)
class UnitTransfer:
    """Where the pieces of one unit lie and which rank steps it; the same on every rank of a stage.

    owner          rank within the stage
    sources        tensor-parallel ranks whose pieces make up the unit; all of them if it is cut
    shard_parts    the parts whose momentum goes to the owner
    update_parts   the parts that take the owner's update. These are the `shard_parts`, except for
                   a replicated unit, whose copies all take the update that the owner made from its
                   own copy
    """

    unit: Unit
    owner: int
    sources: tuple[int, ...]
    shard_parts: tuple[ShardPart, ...]
    update_parts: tuple[ShardPart, ...]

    @property
    def pieces(self) -> int:
        """Number of tensor-parallel pieces that make up the unit."""
        return len(self.sources)

    @property
    def is_local(self) -> bool:
        """Whether the whole unit lies in its owner's shard, so that nothing has to be sent."""
        alone = len(self.shard_parts) == 1 and self.shard_parts[0].rank == self.owner
        return alone and self.update_parts == self.shard_parts

    def row(self, tensor_rank: int) -> int:
        """Index of a tensor-parallel rank's piece among the unit's pieces."""
        return self.sources.index(tensor_rank) if self.pieces > 1 else 0


def plan_transfers(
    stage_units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    owners: Mapping[str, int],
) -> list[UnitTransfer]:
    """Plan the transfer of every unit that has an owner.

    Args:
        stage_units: the units of each tensor-parallel rank of the stage, ranks ascending.
        bucket_layout: of the stage.
        owners: rank within the stage by unit name; units without an entry are left out.
    """
    tensor_size = len(stage_units)
    all_tensor_ranks = tuple(range(tensor_size))

    def parts(unit: Unit, tensor_ranks: tuple[int, ...]) -> tuple[ShardPart, ...]:
        return tuple(
            ShardPart(data * tensor_size + rank, rank, bucket_layout.shard_spans(unit, data))
            for data in bucket_layout.holders(unit)
            for rank in tensor_ranks
        )

    transfers = []
    for tensor_rank, units in enumerate(stage_units):
        for unit in units:
            cut = unit.shard_axis is not None
            if unit.name not in owners or (tensor_rank > 0 and (cut or unit.replicated)):
                continue
            owner = owners[unit.name]
            if unit.replicated:
                own = (owner % tensor_size,)
                both = parts(unit, own), parts(unit, all_tensor_ranks)
                transfers.append(UnitTransfer(unit, owner, own, *both))
            else:
                sources = all_tensor_ranks if cut else (tensor_rank,)
                everything = parts(unit, sources)
                transfers.append(UnitTransfer(unit, owner, sources, everything, everything))
    return transfers


def shardwise(
    stage_units: Sequence[Sequence[Unit]], matrix: Callable[[Unit], bool]
) -> list[list[Unit]]:
    """Declare each tensor-parallel piece of a cut `matrix` as a unit of its own."""
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


class TransferPlan(Plan[UnitTransfer, ShardPart]):
    """The parts that one rank of a stage sends and receives in one direction of the exchange."""

    def spans(self) -> list[Span]:
        """The spans in this rank's shard, in the order in which they are sent."""
        return [span for _, part in self.shard_side for span in part.spans]

    def places(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Views of the spans of the units owned here, in the order in which they are sent.

        `whole[name]` is `[pieces, local elements]`.
        """
        return [
            whole[transfer.unit.name][transfer.row(part.tensor_rank)].narrow(
                0, span.piece_start, span.length
            )
            for transfer, part in self.owner_side
            for span in part.spans
        ]


class Exchange:
    """The two all-to-alls of one group of units, planned once, for one rank.

    Local transfers are left out: their owners copy within their own shard (`Buffers.collect`).
    """

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        stage: Axis,
        dtype: torch.dtype | None,
        *,
        kind: str = "exchange",
    ) -> None:
        """Plan both directions.

        `dtype` is that of the elements that are sent, None for that of the tensors given. Bytes
        are counted as `<kind> in` and `<kind> out`.
        """
        self.stage = stage
        self.dtype = dtype
        self.kind = kind
        self.transfers = [transfer for transfer in transfers if not transfer.is_local]
        ranks = stage.rank, stage.size
        self.to_owner = TransferPlan(self.transfers, *ranks, lambda each: each.shard_parts)
        self.from_owner = TransferPlan(self.transfers, *ranks, lambda each: each.update_parts)

    def gather_to_owner(
        self, span_view: Callable[[Span], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        comm_volume: CommVolume, *, exact: bool = False,
    ) -> None:  # fmt: skip
        """Copy every `span_view(span)` to its place in `whole[name]` at the unit's owner.

        `whole[name]` is `[pieces, local elements]`; `like` gives dtype and device. With `exact` the
        elements are sent in the dtype of `like`.
        """
        if not self.transfers:
            return
        plan = self.to_owner
        received = self._all_to_all(
            [span_view(span) for span in plan.spans()], plan.owner_counts, plan.shard_counts,
            like, comm_volume, "in", like.dtype if exact else self.dtype,
        )  # fmt: skip
        targets = plan.places(whole)
        copy_all_(zip(targets, unpacked(received, targets), strict=True))

    def scatter_from_owner(
        self, whole: Mapping[str, Tensor], span_view: Callable[[Span], Tensor], like: Tensor,
        comm_volume: CommVolume, *, replace: bool = False,
    ) -> None:  # fmt: skip
        """Add every span of the owners' `whole[name]` to `span_view(span)` where the span lies.

        `whole[name]` is `[pieces, local elements]`; `like` gives dtype and device. With `replace`
        the span is overwritten, where what comes is finite, and its elements are sent in the dtype
        of `like`.
        """
        if not self.transfers:
            return
        plan = self.from_owner
        received = self._all_to_all(
            plan.places(whole), plan.shard_counts, plan.owner_counts,
            like, comm_volume, "out", like.dtype if replace else self.dtype,
        )  # fmt: skip
        targets = [span_view(span) for span in plan.spans()]
        if not targets:
            return
        if replace:
            old = torch.cat(targets)
            new = torch.where(received.isfinite(), received.to(old.dtype), old)
        else:
            new = received.to(targets[0].dtype)
        put_all_ = copy_all_ if replace else add_all_
        put_all_(zip(targets, unpacked(new, targets), strict=True))

    def _all_to_all(
        self, sources: list[Tensor], in_counts: list[int], out_counts: list[int], like: Tensor,
        comm_volume: CommVolume, direction: str, dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        """Send `sources` and return what the other ranks sent, concatenated."""
        send = packed(sources, like, dtype)
        kind = f"{self.kind} {direction}"
        return all_to_all(send, in_counts, out_counts, self.stage, comm_volume, kind)


class WeightExchange:
    """Fills the weights of owned units from the model's parameters.

    Every data-parallel rank holds its tensor rank's parameters in full, so an owner lacks only the
    pieces of other tensor-parallel ranks, and receives them from the ranks of its own tensor group.
    """

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        tensor: Axis,
        data_rank: int,
        *,
        kind: str = "exchange weights",
    ) -> None:
        """Plan the exchange for the owners among `transfers`; bytes are counted as `kind`."""
        self.tensor = tensor
        self.kind = kind
        near = [each for each in transfers if each.owner // tensor.size == data_rank]
        mine = [each for each in near if each.owner % tensor.size == tensor.rank]
        moved = [each for each in near if each.sources != (each.owner % tensor.size,)]
        self.own = [each for each in mine if each.sources == (tensor.rank,)]
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
        self.out_counts = elements_per_rank(
            tensor.size, ((each.owner % tensor.size, local_numel(each)) for each in self.outgoing)
        )
        self.in_counts = elements_per_rank(
            tensor.size, ((source, local_numel(each)) for source, each in self.incoming)
        )

    def gather_to_owner(
        self, local: Callable[[Unit], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        comm_volume: CommVolume,
    ) -> None:  # fmt: skip
        """Fill `whole[name]` `[pieces, local elements]` of the units owned here.

        Each piece is its rank's `local(unit)`. `like` gives dtype and device.
        """
        copy_all_(
            (whole[transfer.unit.name][0].view(mine.shape), mine)
            for transfer in self.own
            for mine in [local(transfer.unit)]
        )
        if self.tensor.size == 1:
            return
        pieces = [local(transfer.unit).flatten() for transfer in self.outgoing]
        received = all_to_all(
            packed(pieces, like),
            self.in_counts,
            self.out_counts,
            self.tensor,
            comm_volume,
            self.kind,
        )
        parts = received.split([local_numel(transfer) for _, transfer in self.incoming])
        copy_all_(
            (whole[transfer.unit.name][transfer.row(source)], part)
            for (source, transfer), part in zip(self.incoming, parts, strict=True)
        )


def local_numel(transfer: UnitTransfer) -> int:
    """Elements of one tensor-parallel piece of a unit."""
    return transfer.unit.numel // transfer.pieces


def empty_pieces(
    transfers: Iterable[UnitTransfer], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Allocate `[pieces, local elements]` for each unit, by name."""
    return {
        each.unit.name: torch.empty(each.pieces, local_numel(each), dtype=dtype, device=device)
        for each in transfers
    }


def assemble(transfer: UnitTransfer, pieces: Tensor) -> Tensor:
    """Join a unit's pieces `[pieces, local elements]` to the whole matrix `[rows, cols]`."""
    unit = transfer.unit
    local = pieces.view(transfer.pieces, *unit.local_axes(transfer.pieces))
    if transfer.pieces == 1 or unit.shard_axis == 0:
        return local.view(unit.shape)
    assert unit.shard_axis is not None  # a unit in pieces is cut along one
    # [pieces, ..., axis / pieces, ...] -> [..., axis, ...]
    return torch.cat(list(local), dim=unit.shard_axis).view(unit.shape)


def disassemble_(transfer: UnitTransfer, whole: Tensor, pieces: Tensor) -> None:
    """Cut the matrix `whole` `[rows, cols]` into `pieces`: the inverse of `assemble`."""
    for row in range(transfer.pieces):
        pieces[row].copy_(transfer.unit.piece(whole, row, transfer.pieces).flatten())


def assemble_stack(transfers: Sequence[UnitTransfer], pieces: Mapping[str, Tensor]) -> Tensor:
    """Join the pieces `[pieces, local elements]` of units of one shape to `[units, rows, cols]`."""
    return torch.stack([assemble(each, pieces[each.unit.name]) for each in transfers])


class Room:
    """Memory for the pieces of stacks of units, each stack in one piece.

    Attributes:
        pieces: `[pieces, local elements]` of each unit, by name; views.
    """

    def __init__(
        self,
        stacks: Sequence[Sequence[UnitTransfer]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate room for the units of `stacks`, each of units of one shape."""
        self.dtype, self.device = dtype, device
        self.pieces: dict[str, Tensor] = {}
        self._stacks: dict[str, Tensor] = {}  # by the name of the first unit
        for transfers in stacks:
            stack = torch.empty(len(transfers), transfers[0].unit.numel, dtype=dtype, device=device)
            self._stacks[transfers[0].unit.name] = stack
            for transfer, flat in zip(transfers, stack, strict=True):
                self.pieces[transfer.unit.name] = flat.view(transfer.pieces, -1)

    def assembled(self, transfers: Sequence[UnitTransfer], part: slice) -> Tensor:
        """Return some matrices of a stack `[units, rows, cols]`: a view, unless units are cut."""
        if any(transfer.pieces > 1 for transfer in transfers):
            return assemble_stack(transfers[part], self.pieces)
        first = transfers[0].unit
        return self._stacks[first.name].view(len(transfers), *first.shape)[part]

    def set_(self, transfers: Sequence[UnitTransfer], part: slice, stack: Tensor) -> None:
        """Write some matrices of a stack, unless they are the view that `assembled` returned."""
        if any(transfer.pieces > 1 for transfer in transfers):
            disassemble_stack_(transfers[part], stack, self.pieces)


def disassemble_stack_(
    transfers: Sequence[UnitTransfer], stack: Tensor, pieces: Mapping[str, Tensor]
) -> None:
    """Cut the matrices of `stack` `[units, rows, cols]` into `pieces[name]`, by unit."""
    for transfer, whole in zip(transfers, stack, strict=True):
        disassemble_(transfer, whole, pieces[transfer.unit.name])
