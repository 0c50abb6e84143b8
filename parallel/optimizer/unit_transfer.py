"""Sends the shards of each matrix to its owner, and sends the updates back.

A matrix may be split by tensor parallelism and by the boundaries of data-parallel shards. Each
matrix has one owner among the ranks of its pipeline stage. One packed all-to-all sends momentum
pieces to the owners, and another sends the updates back. Owners store the weights of their
matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume, all_to_all
from parallel.comm.groups import Domain
from parallel.storage.bucket_layout import BucketLayout
from spectral.division import span_of
from spectral.sharded.exchange import Exchange, Part, Transfer

TensorMode = Literal["owner", "shardwise"]
"""Update mode of tensor-parallel matrices. owner: one rank updates the whole matrix; shardwise:
each rank updates its piece as a separate matrix, which gives different results."""


@dataclass(frozen=True)
class UnitTransfer(Transfer):
    """The owner of a unit and the positions of its pieces, identical on every rank of a stage.

    A part maps a range of a bucket shard to a range of the unit's concatenated, flattened pieces.

    owner          rank within the stage: tensor rank + tensor size * data rank
    tensor_ranks   tensor-parallel ranks with pieces of the unit; all ranks for a sharded unit
    targets        parts that receive the update: the sources or, for replicated units, all copies
    """

    unit: Unit
    tensor_ranks: tuple[int, ...]

    @property
    def pieces(self) -> int:
        """Number of tensor-parallel pieces of the unit."""
        return len(self.tensor_ranks)

    @property
    def in_order(self) -> bool:
        """Whether the concatenated pieces form the matrix in row-major order."""
        return self.pieces == 1 or self.unit.shard_axis == 0

    def logical(self, pieces: Tensor) -> Tensor:
        """Return a view of flattened pieces `[elements]` in matrix order, with the sharded axis
        split into two axes: piece and position within the piece."""
        local = pieces.view(self.pieces, *self.unit.local_axes(self.pieces))
        return local.movedim(0, self.unit.shard_axis or 0)

    def whole(self, pieces: Tensor) -> Tensor:
        """Assemble the matrix `[rows, cols]` from flattened pieces, as a view if `in_order`."""
        return self.logical(pieces).reshape(self.unit.shape)

    def cut_(self, whole: Tensor, pieces: Tensor) -> None:
        """Copy a matrix `[rows, cols]` to flattened pieces; the inverse of `whole`."""
        target = self.logical(pieces)
        target.copy_(whole.reshape(target.shape))


def plan_transfers(
    stage_units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, owners: Mapping[str, int]
) -> list[UnitTransfer]:
    """Plan the transfer of every unit that has an owner.

    Args:
        stage_units: each tensor-parallel rank's list of units, in rank order.
        bucket_layout: the stage's layout.
        owners: owner's rank within the stage, by unit name; units without an entry are omitted.
    """
    tensor_size = len(stage_units)
    all_tensor_ranks = tuple(range(tensor_size))

    def parts(unit: Unit, tensor_ranks: tuple[int, ...], pieces: int) -> tuple[Part, ...]:
        local, cuts = unit.numel // pieces, bucket_layout.cuts(unit)
        return tuple(
            Part(
                data * tensor_size + rank,
                span.bucket,
                (span_of(span.start - data * bucket_layout.shard_numel(span.bucket), span.length),),
                (span_of(local * (i % pieces) + span.piece_start, span.length),),
            )
            for i, rank in enumerate(tensor_ranks)
            for data, span in cuts
        )

    transfers = []
    for tensor_rank, units in enumerate(stage_units):
        for unit in units:
            cut = unit.shard_axis is not None
            if unit.name not in owners or (tensor_rank > 0 and (cut or unit.replicated)):
                continue
            owner = owners[unit.name]
            ranks = all_tensor_ranks if cut else (tensor_rank,)
            if unit.replicated:
                ranks = (owner % tensor_size,)
            sources = parts(unit, ranks, len(ranks))
            targets = parts(unit, all_tensor_ranks, 1) if unit.replicated else sources
            transfers.append(UnitTransfer(unit.name, owner, sources, targets, unit, ranks))
    return transfers


def shardwise(
    stage_units: Sequence[Sequence[Unit]], matrix: Callable[[Unit], bool]
) -> list[list[Unit]]:
    """Return the units, with each sharded matrix replaced by one unit per piece.

    Only units for which `matrix` returns True are replaced.
    """
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


def stage_exchange(
    transfers: Sequence[UnitTransfer], domain: Domain, volume: CommVolume, kind: str = "exchange"
) -> Exchange:
    """Plan the exchange of units between the ranks of a stage.

    Sent bytes are counted under the kinds `<kind> in` and `<kind> out`.
    """
    stage = domain.stage
    send = partial(all_to_all, axis=stage, comm_volume=volume)
    both = partial(send, kind=f"{kind} in"), partial(send, kind=f"{kind} out")
    return Exchange(transfers, transfers, stage.rank, stage.size, *both)
