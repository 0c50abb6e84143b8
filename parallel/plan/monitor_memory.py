"""Estimated bytes that a monitored step needs in addition, on one rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models.units import Unit
from parallel.optimizer.inspection import inspection_rounds
from parallel.storage.bucket_layout import BucketLayout

GRAM_BYTES: Final = 32
"""Per entry of a Gram matrix while its eigenvalues are computed: four copies in float64."""
ROOT_BYTES: Final = 40
"""Per entry of the Gram matrix of inputs while singular values of outputs are computed."""
BLOCK: Final = 2**22
"""Entries that are in float64 at one time (training/monitor/moments.py)."""


@dataclass(frozen=True, kw_only=True)
class MonitorInputs:
    """What a monitored step computes, as far as memory depends on it.

    weights           number of steps whose initial weights are kept
    gradients         whether the gradients of the step before are kept
    inputs            whether the Gram matrices of inputs are added up
    sampling_rounds   monitored steps over which the layers are spread, to bound the Gram matrices
    samples           micro-batches of a rank whose gradients are kept
    elements          of the matrices that a rank inspects at once, if they are several
    """

    weights: int = 0
    gradients: bool = False
    inputs: bool = False
    sampling_rounds: int = 1
    samples: int = 0
    elements: int = 2**62

    @property
    def before_step(self) -> int:
        """Bytes per element of weights, gradients and earlier gradients."""
        return 4 * (2 + self.gradients)

    @property
    def after_step(self) -> int:
        """Bytes per element of the weights before and after the steps compared, 0 if none are."""
        return 4 * (self.weights + 1) if self.weights else 0


@dataclass(frozen=True)
class MonitorMemory:
    """Bytes on the fullest rank of a domain.

    kept       through forward and backward: earlier weights and gradients, Gram matrices of inputs
    samples    likewise: gradients of single micro-batches
    gathered   while weights and gradients are inspected after it, one round after the other
    history    weights before the steps whose updates are compared, through the optimizer's step
    compared   while updates are inspected after it
    """

    kept: int = 0
    samples: int = 0
    gathered: int = 0
    history: int = 0
    compared: int = 0


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
    before = max(monitored.weights - 1, 0)
    kept = before * (shard + owned) + monitored.gradients * shard
    largest = 0
    if monitored.inputs:
        sizes = gram_bytes(units[0])
        layers = sum(size for unit, size in sizes if unit.layer is not None)
        kept += sum(size for _, size in sizes) - layers + -(-layers // monitored.sampling_rounds)
        largest = max((size // 4 for u, size in sizes if u.role != "embedding"), default=0)
    gathered, compared = inspected_bytes(
        units, bucket_layout, monitored, data * tensor, ROOT_BYTES * largest
    )
    return MonitorMemory(
        kept,
        sample_bytes(units[0], bucket_layout, monitored.samples),
        gathered,
        monitored.weights * (shard + owned),
        compared,
    )


def inspected_bytes(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    monitored: MonitorInputs,
    ranks: int,
    roots: int,
) -> tuple[int, int]:
    """Bytes of what the fullest of the `ranks` of a stage inspects at once: of weights and
    gradients, and of updates.

    `roots` are those of the root of the largest Gram matrix of inputs.
    """
    whole = {unit.name: unit for members in units for unit in members if unit.is_matrix}
    now, then = monitored.before_step, monitored.after_step
    gathered = compared = 0
    for places in inspection_rounds(units, bucket_layout, ranks, monitored.elements):
        held: Counter[int] = Counter()
        stacks: dict[tuple[int, tuple[int, ...]], list[Unit]] = {}
        for name, rank in places.items():
            held[rank] += whole[name].numel
            stacks.setdefault((rank, whole[name].shape), []).append(whole[name])
        for (rank, shape), members in stacks.items():
            entries = sum(unit.numel for unit in members)
            # A single matrix is whole as it is gathered, unless its columns are cut.
            copied = entries if len(members) > 1 or members[0].shard_axis else 0
            received = 4 * held[rank] if ranks > 1 else 0
            gram = GRAM_BYTES * len(members) * min(shape) ** 2
            wide = 8 * min(BLOCK, entries)
            figures = max(gram + wide, 3 * wide, roots)
            gathered = max(gathered, now * held[rank] + max(received, now * copied + figures))
            figures = max(gram + 2 * wide, 6 * wide)
            compared = max(compared, then * held[rank] + max(received, then * copied + figures))
    return gathered, compared if then else 0


def monitored_bytes(domains: Sequence[MonitorMemory]) -> tuple[int, int]:
    """Largest sum of the bytes of all domains of a stage: while matrices are inspected, and before
    and between that."""
    kept, samples, history = (
        sum(getattr(each, name) for each in domains) for name in ("kept", "samples", "history")
    )
    gathered, compared = (
        max(getattr(each, name) for each in domains) for name in ("gathered", "compared")
    )
    inspected = max(kept + max(samples, gathered), history + compared)
    return inspected, max(kept + samples, history)


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
