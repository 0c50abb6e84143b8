"""Brings cut matrices to their homes and takes the updates back.

A matrix may be cut twice: by tensor parallelism, and by the border of a data-parallel shard. Each
has one home among the ranks of its pipeline stage. One packed all-to-all carries the pieces of the
momentum to the homes, one carries the updates back; the weights need no journey over data-parallel
ranks, which all hold them, only over tensor-parallel ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.units import Unit
from parallel.collectives import Traffic, all_to_all
from parallel.groups import Axis
from parallel.layout import Layout, Run


@dataclass(frozen=True)
class Holding:
    """The runs of one unit's flattened local piece that one rank of the stage owns."""

    rank: int  # within the stage: tensor rank + tensor size * data rank
    tensor_rank: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Journey:
    """One unit, where its pieces lie and where it is stepped. The same on every rank of the stage.

    sources   tensor-parallel ranks whose local parameter has a piece of it: all if it is cut
    """

    unit: Unit
    home: int
    sources: tuple[int, ...]
    holdings: tuple[Holding, ...]

    @property
    def pieces(self) -> int:
        """Number of tensor-parallel pieces of the whole unit."""
        return len(self.sources)

    @property
    def stays(self) -> bool:
        """Whether its home owns all of it, so that nothing travels."""
        return len(self.holdings) == 1 and self.holdings[0].rank == self.home

    def row(self, tensor_rank: int) -> int:
        """Which piece of the whole unit a tensor-parallel rank has."""
        return self.sources.index(tensor_rank)

    def numel(self, holding: Holding) -> int:
        """Elements of one holding."""
        return sum(run.length for run in holding.runs)


def plan_journeys(
    stage_units: Sequence[Sequence[Unit]], layout: Layout, homes: Mapping[str, int]
) -> list[Journey]:
    """The journey of every unit that has a home.

    `stage_units` are the units of each tensor-parallel rank of the stage, in order of rank.
    """
    tensor_size = len(stage_units)
    journeys = []
    for own, units in enumerate(stage_units):
        for unit in units:
            cut = unit.shard_axis is not None
            if unit.name not in homes or (cut and own > 0):
                continue
            sources = tuple(range(tensor_size)) if cut else (own,)
            holdings = tuple(
                Holding(
                    data_rank * tensor_size + source, source, layout.shard_runs(unit, data_rank)
                )
                for data_rank in layout.holders(unit)
                for source in sources
            )
            journeys.append(Journey(unit, homes[unit.name], sources, holdings))
    return journeys


class Exchange:
    """The two all-to-alls of one group of travelling units, planned once, for one rank."""

    def __init__(self, journeys: Sequence[Journey], stage: Axis, wire: torch.dtype | None) -> None:
        """`wire` is the dtype in which momentum and updates travel, None for the arrays' own."""
        self.stage = stage
        self.wire = wire
        self.journeys = [journey for journey in journeys if not journey.stays]
        # Both ends go through the journeys of a pair of ranks in the same order.
        self.outgoing = [
            (journey, holding)
            for home in range(stage.size)
            for journey in self.journeys
            for holding in journey.holdings
            if journey.home == home and holding.rank == stage.rank
        ]
        self.incoming = [
            (journey, holding)
            for source in range(stage.size)
            for journey in self.journeys
            for holding in journey.holdings
            if journey.home == stage.rank and holding.rank == source
        ]
        self.out_counts = self._counts((j.home, j.numel(h)) for j, h in self.outgoing)
        self.in_counts = self._counts((h.rank, j.numel(h)) for j, h in self.incoming)

    def bring(
        self, piece: Callable[[Run], Tensor], whole: Mapping[str, Tensor], like: Tensor,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """None; copies every run `piece(run)` to its place in `whole[name]`
        `[pieces, local elements]` at the unit's home. `like` gives dtype and device."""
        if not self.journeys:
            return
        sources = [piece(run) for _, holding in self.outgoing for run in holding.runs]
        received = self._travel(sources, self.in_counts, self.out_counts, like, traffic, "in")
        targets = self._places(whole)
        parts = received.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def take_back(
        self, whole: Mapping[str, Tensor], piece: Callable[[Run], Tensor], like: Tensor,
        traffic: Traffic,
    ) -> None:  # fmt: skip
        """None; adds every run of `whole[name]` `[pieces, local elements]` at the homes to
        `piece(run)` at the run's owner. `like` gives dtype and device."""
        if not self.journeys:
            return
        places = self._places(whole)
        received = self._travel(places, self.out_counts, self.in_counts, like, traffic, "out")
        targets = [piece(run) for _, holding in self.outgoing for run in holding.runs]
        parts = received.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.add_(part)

    def _travel(
        self, sources: list[Tensor], in_counts: list[int], out_counts: list[int], like: Tensor,
        traffic: Traffic, direction: str,
    ) -> Tensor:  # fmt: skip
        """What the other ranks sent here of their `sources`, one after the other."""
        send = torch.cat([like.new_empty(0), *sources]).to(self.wire or like.dtype)
        kind = f"exchange {direction}"
        return all_to_all(send, in_counts, out_counts, self.stage, traffic, kind)

    def _places(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Where the runs of the incoming holdings lie in their whole units, in travelling order."""
        return [
            whole[journey.unit.name][journey.row(holding.tensor_rank)].narrow(
                0, run.piece_start, run.length
            )
            for journey, holding in self.incoming
            for run in holding.runs
        ]

    def _counts(self, travellers: Iterable[tuple[int, int]]) -> list[int]:
        """Elements per rank of the stage, from (rank, elements) of every traveller."""
        counts = [0] * self.stage.size
        for rank, numel in travellers:
            counts[rank] += numel
        return counts


class WeightExchange:
    """Brings weights to homes that do not have them.

    Every data-parallel rank holds its tensor rank's parameters in full, so a home lacks only what
    other tensor-parallel ranks have, and hears from those beside it.
    """

    def __init__(self, journeys: Sequence[Journey], tensor: Axis, data_rank: int) -> None:
        self.tensor = tensor
        self.data_rank = data_rank
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
        self.out_counts, self.in_counts = [0] * tensor.size, [0] * tensor.size
        for journey in self.outgoing:
            self.out_counts[journey.home % tensor.size] += local_numel(journey)
        for source, journey in self.incoming:
            self.in_counts[source] += local_numel(journey)

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
            send, self.in_counts, self.out_counts, self.tensor, traffic, "exchange weights"
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
    # [pieces, ..., axis / pieces, ...] -> [..., axis, ...]
    return torch.cat(list(local), dim=unit.shard_axis).view(unit.shape)


def disassemble_(journey: Journey, whole: Tensor, pieces: Tensor) -> None:
    """None; the inverse of `assemble`, into `pieces`."""
    for row in range(journey.pieces):
        pieces[row].copy_(journey.unit.piece(whole, row, journey.pieces).flatten())
