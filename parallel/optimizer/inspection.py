"""Which rank inspects which matrices, and which matrices are inspected at once."""

from collections.abc import Sequence

from models.units import Unit
from parallel.storage.bucket_layout import BucketLayout
from spectral.batching import grouped
from spectral.sharded.placement import longest_processing_time


def inspection_ranks(units: Sequence[Sequence[Unit]], ranks: int) -> dict[str, int]:
    """Choose the rank, of the `ranks` of a stage, that inspects the matrices of each parameter.

    `units` are those of each tensor-parallel rank. The costliest parameters are placed first, each
    on the rank with the smallest load so far.
    """
    costs: dict[str, int] = {}
    for members in units:
        for unit in {u.name: u for u in members if u.is_matrix}.values():
            short, long = sorted(unit.shape)
            costs[unit.parameter] = costs.get(unit.parameter, 0) + short * short * (long + short)
    names = sorted(costs)
    owners = longest_processing_time([costs[name] for name in names], [0.0] * ranks)
    return dict(zip(names, owners, strict=True))


def inspection_rounds(
    units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, ranks: int, elements: int
) -> list[dict[str, int]]:
    """Divide the matrices of a stage into rounds; each is the inspection rank by unit name.

    A round has matrices of one bucket, and of each rank no more than `elements` elements, or a
    single matrix. Arguments as of `inspection_ranks`.
    """
    places = inspection_ranks(units, ranks)
    whole = {unit.name: unit for members in units for unit in members if unit.is_matrix}
    buckets = grouped(whole.values(), lambda unit: bucket_layout.slots[unit.parameter][0].index)
    chunks: list[dict[str, int]] = []
    for members in buckets.values():
        rounds: list[dict[str, int]] = []
        last: dict[int, tuple[int, int]] = {}  # by rank: its last round, and its elements there
        # Matrices of one shape, which are inspected together, in the same round if they fit.
        for unit in sorted(members, key=lambda u: (u.shape, u.name)):
            rank = places[unit.parameter]
            number, before = last.get(rank, (0, 0))
            if before and before + unit.numel > elements:
                number, before = number + 1, 0
            last[rank] = number, before + unit.numel
            if number == len(rounds):
                rounds.append({})
            rounds[number][unit.name] = rank
        chunks += rounds
    return chunks
