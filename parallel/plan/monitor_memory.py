"""Bytes that a step needs on one rank because monitors look at it, an estimate."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.units import Unit
from parallel.optimizer.placement import inspection_ranks
from parallel.storage.bucket_layout import BucketLayout

WIDE_BYTES = 40
"""Per element of the matrices of one shape that are looked at: five copies in float64."""
ROOT_BYTES = 32
"""Per element of a Gram matrix of inputs while its eigenvalues are found: four in float64."""


@dataclass(frozen=True, kw_only=True)
class MonitorInputs:
    """What is looked at, as far as memory depends on it.

    weights     steps whose weights at their beginning are kept
    gradients   whether those of the step before are kept
    inputs      whether the Gram matrices of inputs are added up
    turns       that layers take at that
    samples     micro-batches of a rank whose gradients are kept
    """

    weights: int = 0
    gradients: bool = False
    inputs: bool = False
    turns: int = 1
    samples: int = 0


@dataclass(frozen=True)
class MonitorMemory:
    """Bytes on the fullest rank of a domain.

    kept      through the step: weights and gradients of the steps before, Gram matrices of inputs
    samples   from forward until backward is over: gradients of single micro-batches
    moment    while matrices are looked at, one bucket after the other
    """

    kept: int
    samples: int
    moment: int


def monitor_memory(
    units: Sequence[Sequence[Unit]],
    layout: BucketLayout,
    preconditioned: Sequence[Unit],
    monitored: MonitorInputs,
    *,
    data: int,
    tensor: int,
) -> MonitorMemory:
    """The memory of a domain, given its units on each of its tensor ranks and those of them that
    are preconditioned."""
    shard = 4 * layout.numel // data
    owners = 4 * sum(unit.numel for unit in preconditioned) // (data * tensor)
    # The gradients go when the weights that the step itself began with come.
    before = max(monitored.weights - 1, 0)
    kept = max(
        before * (shard + owners) + monitored.gradients * shard,
        monitored.weights * (shard + owners),
    )
    largest = 0
    if monitored.inputs:
        sizes = gram_bytes(units[0])
        layers = sum(size for unit, size in sizes if unit.layer is not None)
        kept += sum(size for _, size in sizes) - layers + -(-layers // monitored.turns)
        largest = max((size for u, size in sizes if u.role != "embedding"), default=0)
    brought, alike = moved_elements(units, layout, data * tensor)
    # The weights, gradients and those of the step before; later the weights of all steps compared.
    arrays = 4 * max(2 + monitored.gradients, monitored.weights + 1)
    at_once = max((arrays + WIDE_BYTES) * alike, ROOT_BYTES // 4 * largest)
    return MonitorMemory(
        kept, sample_bytes(units[0], layout, monitored.samples), arrays * brought + at_once
    )


def monitored_bytes(domains: Sequence[MonitorMemory]) -> int:
    """Bytes of all domains of a stage at the worst moment."""
    samples, moment = sum(each.samples for each in domains), max(each.moment for each in domains)
    return sum(each.kept for each in domains) + max(samples, moment)


def gram_bytes(units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    """A unit of each parameter, and the bytes of the float32 Gram matrix of what it multiplies; of
    the embedding a count per row."""
    first = {unit.parameter: unit for unit in reversed(units) if unit.is_matrix}
    return [
        (unit, 4 * (unit.axes[0] if unit.role == "embedding" else unit.axes[-1] ** 2))
        for unit in first.values()
    ]


def sample_bytes(units: Sequence[Unit], layout: BucketLayout, samples: int) -> int:
    """Bytes of the gradients of this rank's samples, and of a parameter's in float64."""
    sizes = [layout.slots[name][1].numel for name in {u.parameter for u in units if u.is_matrix}]
    return samples * (4 * sum(sizes) + 16 * max(sizes, default=0))


def moved_elements(
    units: Sequence[Sequence[Unit]], layout: BucketLayout, ranks: int
) -> tuple[int, int]:
    """Elements of the matrices of a bucket that one of the stage's `ranks` looks at, and of those
    of one shape among them; the most of each."""
    places = inspection_ranks(units, ranks)
    buckets: dict[tuple[int, int], int] = {}
    shapes: dict[tuple[int, int, tuple[int, ...]], int] = {}
    whole = {unit.name: unit for members in units for unit in members if unit.is_matrix}
    for unit in whole.values():
        bucket, _ = layout.slots[unit.parameter]
        key = bucket.index, places[unit.parameter]
        buckets[key] = buckets.get(key, 0) + unit.numel
        shapes[*key, unit.shape] = shapes.get((*key, unit.shape), 0) + unit.numel
    return max(buckets.values(), default=0), max(shapes.values(), default=0)
