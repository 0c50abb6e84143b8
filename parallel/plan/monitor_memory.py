"""Estimated bytes that a monitored step needs in addition, on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.units import Unit
from parallel.optimizer.placement import inspection_ranks
from parallel.storage.bucket_layout import BucketLayout

WIDE_BYTES = 40
"""Per element of the inspected matrices of one shape: five copies in float64."""
ROOT_BYTES = 32
"""Per element of a Gram matrix of inputs while its eigenvalues are computed: four in float64."""


@dataclass(frozen=True, kw_only=True)
class MonitorInputs:
    """What a monitored step computes, as far as memory depends on it.

    weights           number of steps whose initial weights are kept
    gradients         whether the gradients of the step before are kept
    inputs            whether the Gram matrices of inputs are added up
    sampling_rounds   monitored steps over which the layers are spread, to bound the Gram matrices
    samples           micro-batches of a rank whose gradients are kept
    """

    weights: int = 0
    gradients: bool = False
    inputs: bool = False
    sampling_rounds: int = 1
    samples: int = 0

    @property
    def gathered(self) -> int:
        """Bytes per element that are gathered: of weights, gradients and the earlier gradients, or
        later of the weights of all steps compared."""
        return 4 * max(2 + self.gradients, self.weights + 1)


@dataclass(frozen=True)
class MonitorMemory:
    """Bytes on the fullest rank of a domain.

    kept       through the whole step: earlier weights and gradients, Gram matrices of inputs
    samples    through forward and backward: gradients of single micro-batches
    gathered   while matrices are inspected, one bucket after the other
    """

    kept: int
    samples: int
    gathered: int


def monitor_memory(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    preconditioned: Sequence[Unit],
    monitored: MonitorInputs,
    *,
    data: int,
    tensor: int,
) -> MonitorMemory:
    """Memory of a domain, given its units on each tensor-parallel rank and its PC layers."""
    shard = 4 * bucket_layout.numel // data
    owned = 4 * sum(unit.numel for unit in preconditioned) // (data * tensor)
    # The earlier gradients are freed before the weights at the beginning of this step are kept.
    before = max(monitored.weights - 1, 0)
    kept = max(
        before * (shard + owned) + monitored.gradients * shard,
        monitored.weights * (shard + owned),
    )
    largest = 0
    if monitored.inputs:
        sizes = gram_bytes(units[0])
        layers = sum(size for unit, size in sizes if unit.layer is not None)
        kept += sum(size for _, size in sizes) - layers + -(-layers // monitored.sampling_rounds)
        largest = max((size for u, size in sizes if u.role != "embedding"), default=0)
    bucket, shape = gathered_elements(units, bucket_layout, data * tensor)
    at_once = max((monitored.gathered + WIDE_BYTES) * shape, ROOT_BYTES // 4 * largest)
    return MonitorMemory(
        kept,
        sample_bytes(units[0], bucket_layout, monitored.samples),
        monitored.gathered * bucket + at_once,
    )


def least_inspected(monitored: MonitorInputs | None, elements: int) -> int:
    """Bytes that the inspection of a matrix of so many elements takes at least."""
    return 0 if monitored is None else (2 * monitored.gathered + WIDE_BYTES) * elements


def monitored_bytes(domains: Sequence[MonitorMemory]) -> tuple[int, int]:
    """Largest sum of the bytes of all domains of a stage, after backward and up to there."""
    kept = sum(each.kept for each in domains)
    samples = sum(each.samples for each in domains)
    gathered = max(each.gathered for each in domains)
    return kept + max(samples, gathered), kept + samples


def gram_bytes(units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    """One unit of each parameter, and the bytes of the float32 Gram matrix of its inputs.

    Of the embedding, the bytes of a count per row.
    """
    first = {unit.parameter: unit for unit in reversed(units) if unit.is_matrix}
    return [
        (unit, 4 * (unit.axes[0] if unit.role == "embedding" else unit.axes[-1] ** 2))
        for unit in first.values()
    ]


def sample_bytes(units: Sequence[Unit], bucket_layout: BucketLayout, samples: int) -> int:
    """Bytes of the samples' gradients on a rank, and of one parameter's in float64."""
    sizes = [
        bucket_layout.slots[name][1].numel for name in {u.parameter for u in units if u.is_matrix}
    ]
    return samples * (4 * sum(sizes) + 16 * max(sizes, default=0))


def gathered_elements(
    units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, ranks: int
) -> tuple[int, int]:
    """Elements of one bucket's matrices, and of those of one shape, that a rank inspects.

    Both are the largest over the `ranks` of the stage.
    """
    places = inspection_ranks(units, ranks)
    buckets: dict[tuple[int, int], int] = {}
    shapes: dict[tuple[int, int, tuple[int, ...]], int] = {}
    whole = {unit.name: unit for members in units for unit in members if unit.is_matrix}
    for unit in whole.values():
        bucket, _ = bucket_layout.slots[unit.parameter]
        key = bucket.index, places[unit.parameter]
        buckets[key] = buckets.get(key, 0) + unit.numel
        shapes[*key, unit.shape] = shapes.get((*key, unit.shape), 0) + unit.numel
    return max(buckets.values(), default=0), max(shapes.values(), default=0)
