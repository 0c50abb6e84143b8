"""Brings cut matrices to their homes and takes the updates back.

A matrix may be cut twice: by tensor parallelism, and by the border of a data-parallel shard. Each
has one home among the ranks of its pipeline stage. One packed all-to-all carries the pieces of the
momentum to the homes, one carries the updates back; the weights need no journey over data-parallel
ranks, which all hold them, only over tensor-parallel ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import Traffic, all_to_all
from parallel.comm.groups import Axis
from parallel.storage.bucket_layout import Layout, Run


@dataclass(frozen=True)
class Holding:
    """The runs of one unit's flattened local piece that one rank of the stage owns."""

    rank: int  # within the stage: tensor rank + tensor size * data rank
    tensor_rank: int
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return sum(run.length for run in self.runs)


TensorMode = Literal["home", "duplicated", "shardwise"]
"""Who steps a matrix that tensor parallelism cuts: one home; every tensor-parallel rank, for
comparison; or each rank its own piece as a matrix by itself, which is other mathematics."""


@dataclass(frozen=True)
class Journey:
    """One unit, where its pieces lie and where it is stepped. The same on every rank of the stage.

    sources   tensor-parallel ranks whose pieces make up the unit: all if it is cut
    holdings  whose momentum comes to the home
    returns   whose weights the home's update goes to: the holdings, but for a duplicated unit, and
              for a replicated one, whose copies all take the update of the home's own
    """

    unit: Unit
    home: int
    sources: tuple[int, ...]
    holdings: tuple[Holding, ...]
    returns: tuple[Holding, ...]

    @property
    def pieces(self) -> int:
        """Number of tensor-parallel pieces of the whole unit."""
        return len(self.sources)

    @property
    def stays(self) -> bool:
        """Whether its home owns all of it, so that nothing travels."""
        alone = len(self.holdings) == 1 and self.holdings[0].rank == self.home
        return alone and self.returns == self.holdings

    def row(self, tensor_rank: int) -> int:
        """Which piece of the whole unit a tensor-parallel rank has."""
        return self.sources.index(tensor_rank) if self.pieces > 1 else 0


def plan_journeys(
    stage_units: Sequence[Sequence[Unit]],
    layout: Layout,
    homes: Mapping[str, int],
    mode: TensorMode = "home",
) -> list[Journey]:
    """The journey of every unit that has a home.

    `stage_units` are the units of each tensor-parallel rank of the stage, in order of rank.
    """
    tensor_size = len(stage_units)
    journeys = []
    for own, units in enumerate(stage_units):
        for unit in units:
            cut = unit.shard_axis is not None
            if unit.name not in homes or (own > 0 and (cut or unit.replicated)):
                continue
            home = homes[unit.name]
            everywhere = tuple(range(tensor_size))

            def held(ranks: tuple[int, ...], unit: Unit = unit) -> tuple[Holding, ...]:
                return tuple(
                    Holding(data * tensor_size + rank, rank, layout.shard_runs(unit, data))
                    for data in layout.holders(unit)
                    for rank in ranks
                )

            if unit.replicated:
                mine = (home % tensor_size,)
                journeys.append(Journey(unit, home, mine, held(mine), held(everywhere)))
            elif cut and mode == "duplicated":
                beside = home - home % tensor_size
                journeys += [
                    Journey(unit, beside + rank, everywhere, held(everywhere), held((rank,)))
                    for rank in everywhere
                ]
            else:
                sources = everywhere if cut else (own,)
                journeys.append(Journey(unit, home, sources, held(sources), held(sources)))
    return journeys


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


class Passage:
    """The holdings that travel between owners and homes in one direction, as one rank sees them.

    owned   (journey, holding) of this rank's own holdings, homes ascending
    homed   (journey, holding) of what this rank homes, owners ascending
    """

    def __init__(
        self,
        journeys: Sequence[Journey],
        stage: Axis,
        holdings: Callable[[Journey], tuple[Holding, ...]],
    ) -> None:
        # Both ends go through the holdings of a pair of ranks in the same order.
        pairs = [(journey, held) for journey in journeys for held in holdings(journey)]
        self.owned = sorted(
            (pair for pair in pairs if pair[1].rank == stage.rank), key=lambda pair: pair[0].home
        )
        self.homed = sorted(
            (pair for pair in pairs if pair[0].home == stage.rank), key=lambda pair: pair[1].rank
        )
        self.owned_counts = counts(stage, ((j.home, h.numel) for j, h in self.owned))
        self.homed_counts = counts(stage, ((h.rank, h.numel) for _, h in self.homed))

    def runs(self) -> list[Run]:
        """This rank's own runs, in travelling order."""
        return [run for _, held in self.owned for run in held.runs]

    def places(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Where the runs of the holdings homed here lie in their units, in travelling order."""
        return [
            whole[journey.unit.name][journey.row(held.tensor_rank)].narrow(
                0, run.piece_start, run.length
            )
            for journey, held in self.homed
            for run in held.runs
        ]


def counts(axis: Axis, travellers: Iterable[tuple[int, int]]) -> list[int]:
    """Elements per rank of an axis, from (rank, elements) of every traveller."""
    total = [0] * axis.size
    for rank, numel in travellers:
        total[rank] += numel
    return total


class Exchange:
    """The two all-to-alls of one group of travelling units, planned once, for one rank."""

    def __init__(
        self,
        journeys: Sequence[Journey],
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
        self.journeys = [journey for journey in journeys if not journey.stays]
        self.inward = Passage(self.journeys, stage, lambda journey: journey.holdings)
        self.outward = Passage(self.journeys, stage, lambda journey: journey.returns)

    def bring(
        self, piece: Callable[[Run], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """None; copies every run `piece(run)` to its place in `whole[name]`
        `[pieces, local elements]` at the unit's home. `like` gives dtype and device."""
        if not self.journeys:
            return
        way = self.inward
        received = self._travel(
            [piece(run) for run in way.runs()], way.homed_counts, way.owned_counts, like,
            traffic, "in", self.wire,
        )  # fmt: skip
        targets = way.places(whole)
        parts = received.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def take_back(
        self, whole: Mapping[str, Tensor], piece: Callable[[Run], Tensor], like: Tensor,
        traffic: Traffic, *, replace: bool = False,
    ) -> None:  # fmt: skip
        """None; adds every run of `whole[name]` `[pieces, local elements]` at the homes to
        `piece(run)` at the run's owner. `like` gives dtype and device. With `replace` it takes the
        place of `piece(run)`, and travels in the dtype of `like`."""
        if not self.journeys:
            return
        way = self.outward
        received = self._travel(
            way.places(whole), way.owned_counts, way.homed_counts, like,
            traffic, "out", like.dtype if replace else self.wire,
        )  # fmt: skip
        targets = [piece(run) for run in way.runs()]
        parts = received.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            if replace:
                target.copy_(part)
            else:
                target.add_(part)

    def _travel(
        self, sources: list[Tensor], in_counts: list[int], out_counts: list[int], like: Tensor,
        traffic: Traffic, direction: str, wire: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        """What the other ranks sent here of their `sources`, one after the other."""
        send = torch.cat([like.new_empty(0), *sources]).to(wire or like.dtype)
        kind = f"{self.kind} {direction}"
        return all_to_all(send, in_counts, out_counts, self.stage, traffic, kind)


class WeightExchange:
    """Brings weights to homes that do not have them.

    Every data-parallel rank holds its tensor rank's parameters in full, so a home lacks only what
    other tensor-parallel ranks have, and hears from those beside it.
    """

    def __init__(
        self,
        journeys: Sequence[Journey],
        tensor: Axis,
        data_rank: int,
        *,
        kind: str = "exchange weights",
    ) -> None:
        """Their bytes are counted as `kind`."""
        self.tensor = tensor
        self.data_rank = data_rank
        self.kind = kind
        travelling = [
            journey
            for journey in journeys
            if journey.home // tensor.size == data_rank
            and journey.sources != (journey.home % tensor.size,)
        ]
        self.outgoing = [
            journey
            for rank in range(tensor.size)
            for journey in travelling
            if journey.home % tensor.size == rank and tensor.rank in journey.sources
        ]
        self.incoming = [
            (source, journey)
            for source in range(tensor.size)
            for journey in travelling
            if journey.home % tensor.size == tensor.rank and source in journey.sources
        ]
        self.out_counts = counts(
            tensor, ((j.home % tensor.size, local_numel(j)) for j in self.outgoing)
        )
        self.in_counts = counts(tensor, ((source, local_numel(j)) for source, j in self.incoming))

    def bring(
        self, local: Callable[[Unit], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """None; fills `whole[name]` `[pieces, local elements]` of every unit homed here that lacks
        a piece from each rank's `local(unit)`. `like` gives dtype and device."""
        if self.tensor.size == 1:
            return
        send = torch.cat([like.new_empty(0), *(local(j.unit).flatten() for j in self.outgoing)])
        received = all_to_all(
            send, self.in_counts, self.out_counts, self.tensor, traffic, self.kind
        )
        parts = received.split([local_numel(journey) for _, journey in self.incoming])
        for (source, journey), part in zip(self.incoming, parts, strict=True):
            whole[journey.unit.name][journey.row(source)].copy_(part)


def local_numel(journey: Journey) -> int:
    """Elements of one tensor-parallel piece of a unit."""
    return journey.unit.numel // journey.pieces


def assemble(journey: Journey, pieces: Tensor) -> Tensor:
    """The whole matrix `[rows, cols]` of a unit's pieces `[pieces, local elements]`."""
    unit = journey.unit
    local = pieces.view(journey.pieces, *unit.local_axes(journey.pieces))
    if journey.pieces == 1:
        return local.view(unit.shape)
    assert unit.shard_axis is not None  # a unit in pieces is cut along one
    # [pieces, ..., axis / pieces, ...] -> [..., axis, ...]
    return torch.cat(list(local), dim=unit.shard_axis).view(unit.shape)


def disassemble_(journey: Journey, whole: Tensor, pieces: Tensor) -> None:
    """None; the inverse of `assemble`, into `pieces`."""
    for row in range(journey.pieces):
        pieces[row].copy_(journey.unit.piece(whole, row, journey.pieces).flatten())
