"""The bucket layout: positions of parameters in flat data-parallel buckets.

A bucket is one flat buffer, divided into `ranks` equal shards. Data-parallel rank r owns the
elements `[r * shard, (r + 1) * shard)`. Each parameter is a contiguous range of one bucket. Buckets
are in the order in which the backward pass completes gradients, last layer first. Parameters are
packed without gaps. If a unit straddles a shard boundary, its momentum is sent to one rank.

If all units of a parameter are PC layers, their owners store W, and no rule updates the shards.
Such parameters are put in separate buckets, whose shards need no float32 master weights. An
embedding shared by two pipeline stages also gets a separate bucket, so that both stages shard it
identically.

The layout is a pure function of the unit shapes and is the same on every rank.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod

from models.units import ALL, Unit
from spectral.batching import grouped

DEFAULT_BUCKET = 40_000_000
"""Default bucket size in elements."""
LAYERS_PER_BUCKET = 2
NEGLIGIBLE = 0.01
"""Fraction by which small parameters, such as gains, may push a bucket over its limit."""

STEP_ELEMENTS = 1 << 27
"""Default limit on elements per rank in a step group; exceeded if four groups are not enough. A
step needs about 24 bytes of scratch memory per element."""
MOST_STEP_GROUPS = 4
GOLDEN = 618
"""Fractional part of the golden ratio, in thousandths; its multiples modulo 1 are evenly spread."""
WORD = 8
"""Number of elements per vectorized load: 16 bytes of bfloat16."""
ALIGNMENT_PADDING = 0.005
"""If alignment padding would exceed this fraction of a bucket, the alignment is halved."""


@dataclass(frozen=True)
class Slot:
    """The range `[offset, offset + numel)` of a bucket, occupied by one parameter."""

    parameter: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One flat buffer.

    index               index of the bucket in the layout
    slots               parameter slots, by offset
    numel               number of elements including padding, a multiple of the number of ranks
    stepped_by_owners   whether owners store the weights of all units in the bucket, so that no rule
                        updates the shards
    """

    index: int
    slots: tuple[Slot, ...]
    numel: int
    stepped_by_owners: bool = False

    @property
    def used(self) -> int:
        """Number of elements, excluding padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Number of padding elements."""
        return self.numel - self.used


@dataclass(frozen=True)
class Span:
    """A contiguous range `[start, start + length)` of a bucket that belongs to one unit.

    piece_start   position of the first element in the unit's flattened local piece
    """

    bucket: int
    start: int
    length: int
    piece_start: int


@dataclass(frozen=True)
class BucketLayout:
    """The buckets for a rank's parameters, identical on all ranks of a pipeline stage.

    ranks   number of data-parallel ranks, each with one shard of every bucket
    """

    ranks: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def slots(self) -> dict[str, tuple[Bucket, Slot]]:
        """The bucket and slot of each parameter, in bucket order."""
        return {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}

    def spans(self, unit: Unit) -> tuple[Span, ...]:
        """Return the spans of the unit's local piece, in row-major order of `unit.view(parameter)`.

        Raises KeyError if the unit's parameter has no slot.
        """
        bucket, slot = self.slots[unit.parameter]
        spans, position = [], 0
        for start, length in local_ranges(unit):
            spans.append(Span(bucket.index, slot.offset + start, length, position))
            position += length
        return tuple(spans)

    def cuts(self, unit: Unit) -> list[tuple[int, Span]]:
        """Split `spans(unit)` at shard boundaries. Return (data-parallel rank, span) pairs in rank
        order.

        The `start` of a span is relative to the bucket, not to the shard.
        """
        cuts = []
        for span in self.spans(unit):
            size, end = self.shard_numel(span.bucket), span.start + span.length
            for rank in range(span.start // size, -(-end // size)):
                start = max(span.start, rank * size)
                length = min(end, (rank + 1) * size) - start
                position = span.piece_start + start - span.start
                cuts.append((rank, Span(span.bucket, start, length, position)))
        return sorted(cuts, key=lambda cut: cut[0])

    def shard_spans(self, unit: Unit, rank: int) -> tuple[Span, ...]:
        """Return the spans of a unit in data-parallel rank `rank`'s shard."""
        return tuple(span for other, span in self.cuts(unit) if other == rank)

    def holders(self, unit: Unit) -> dict[int, int]:
        """Return the number of elements of the unit's local piece in each data-parallel rank's
        shard. The result maps ranks, in order, to numbers of elements. Ranks without elements are
        omitted."""
        counts: dict[int, int] = {}
        for rank, span in self.cuts(unit):
            counts[rank] = counts.get(rank, 0) + span.length
        return counts

    def shard_elements(self, weighted: Iterable[tuple[Unit, int]]) -> list[int]:
        """Return the weighted number of elements in each data-parallel rank's shard. For each
        (unit, weight) in `weighted`, every element of the unit is counted `weight` times."""
        # Accumulate differences between adjacent ranks, so that the cost per unit is independent of
        # the number of ranks.
        steps = [0] * (self.ranks + 1)
        edges = [0] * self.ranks
        for unit, weight in weighted:
            for span in self.spans(unit):
                size, end = self.shard_numel(span.bucket), span.start + span.length
                first, last = span.start // size, (end - 1) // size
                steps[first] += size * weight
                steps[last + 1] -= size * weight
                edges[first] -= (span.start - first * size) * weight
                edges[last] -= ((last + 1) * size - end) * weight
        return [whole + edge for whole, edge in zip(accumulate(steps), edges, strict=False)]

    def shard_numel(self, bucket: int) -> int:
        """Return the number of elements per shard of bucket number `bucket`."""
        return self.buckets[bucket].numel // self.ranks

    def step_groups(self, count: int | None) -> list[tuple[int, ...]]:
        """Group the bucket indices into at most `count` step groups and return them in forward
        order.

        Groups consist of consecutive buckets, and their bucket counts differ by at most one. If
        `count` is None, the number of groups is chosen by `default_step_groups`.
        """
        chosen = default_step_groups(self.numel // self.ranks) if count is None else count
        buckets = len(self.buckets)
        order = range(buckets)[::-1]  # buckets are numbered in backward order
        n = min(chosen, buckets)
        return [tuple(order[buckets * i // n : buckets * (i + 1) // n]) for i in range(n)]

    @property
    def numel(self) -> int:
        """Total number of elements in all buckets, including padding."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Total number of padding elements in all buckets."""
        return sum(bucket.padding for bucket in self.buckets)


def local_ranges(unit: Unit) -> list[tuple[int, int]]:
    """Return the contiguous ranges `(start, length)` of a unit in its flattened local parameter.

    The ranges are in row-major order of `unit.view(parameter)` and only depend on shapes.
    """
    offset, stride = 0, prod(unit.view_shape)
    kept: list[tuple[int, int]] = []  # (size, stride) of the remaining axes
    picks = (*unit.index, *(ALL,) * (len(unit.view_shape) - len(unit.index)))
    for size, pick in zip(unit.view_shape, picks, strict=True):
        stride //= size
        if isinstance(pick, int):
            offset += pick % size * stride
            continue
        chosen = range(size)[pick]
        offset += chosen.start * stride
        if len(chosen) != 1:
            kept.append((len(chosen), chosen.step * stride))
    length = 1
    while kept and kept[-1][1] == length:
        length *= kept.pop()[0]
    starts = [offset]
    for size, step in kept:
        starts = [start + i * step for start in starts for i in range(size)]
    return [(start, length) for start in starts]


@dataclass(frozen=True, kw_only=True)
class BucketPlanner:
    """Plans the buckets for one rank's pipeline stage.

    Attributes:
        ranks: data-parallel size.
        alignment: shard sizes are multiples of this number of elements. If a bucket would need more
            than half a percent of padding, the alignment is halved repeatedly, but not below 8,
            until the padding is small enough.
        parameter_bytes: bytes per all-gathered element.
        preconditioned: returns whether a unit is a PC layer whose owner stores W; only used for
            parameters narrower than float32, because wider ones need no master weights.
    """

    ranks: int = 1
    alignment: int = 64
    parameter_bytes: int = 2
    preconditioned: Callable[[Unit], bool] = lambda unit: False

    def layout(self, units: Sequence[Unit]) -> BucketLayout:
        """Lay out the parameters of `units`, which are in forward order."""
        sizes = {unit.parameter: prod(unit.view_shape) for unit in units}
        tied = {unit.parameter for unit in units if unit.tied_stage}
        contents = set_apart(bucket_parameters(sizes), tied)
        by_owners = {
            name
            for name, members in grouped(units, lambda unit: unit.parameter).items()
            if self.parameter_bytes < 4 and all(map(self.preconditioned, members))
        }
        buckets = [
            self._bucket(index, {name: sizes[name] for name in names}, names[0] in by_owners)
            for index, names in enumerate(set_apart(contents, by_owners))
        ]
        return BucketLayout(self.ranks, tuple(buckets))

    def _bucket(self, index: int, sizes: dict[str, int], stepped_by_owners: bool) -> Bucket:
        """Lay out a bucket's parameters. `sizes` maps their names to sizes, in backward order."""
        slots, offset, names = [], 0, list(sizes)
        word = min(WORD, self.alignment)  # alignment of parameter offsets, where sizes allow
        # All layers have the same parameters. Start each bucket with a different one, so that
        # parameters with a lot of state or work do not always end up in the same rank's shard.
        first = index * GOLDEN % 1000 * len(names) // 1000
        ordered = names[first:] + names[:first]
        # Gammas, one number per unit, come last: they would break the 16-byte alignment of any
        # parameters after them.
        for name in sorted(ordered, key=lambda name: sizes[name] % word > 0):
            slots.append(Slot(name, offset, sizes[name]))
            offset += sizes[name]
        alignment = self.alignment
        while -offset % (self.ranks * alignment) > ALIGNMENT_PADDING * offset and alignment > WORD:
            alignment //= 2
        step = self.ranks * alignment
        return Bucket(index, tuple(slots), -(-offset // step) * step, stepped_by_owners)


def bucket_parameters(sizes: dict[str, int]) -> list[list[str]]:
    """Assign parameters to buckets, and return the names in each bucket, in backward order. `sizes`
    maps parameter names to numbers of elements, in forward order.

    A bucket holds at most two layers. The size limit of a bucket is 40M elements or the size of the
    largest layer, whichever is larger, but at most twice the size of the largest layer. Consecutive
    parameters outside layers are never split across buckets, even if their total size exceeds the
    limit.
    """
    layer_sizes = Counter[str]()
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layer_sizes[layer] += size
    largest = max(layer_sizes.values(), default=DEFAULT_BUCKET)
    most = min(max(largest, DEFAULT_BUCKET), LAYERS_PER_BUCKET * largest) * (1 + NEGLIGIBLE)
    buckets: list[list[str]] = []
    layers = numel = 0
    for layer, block in groupby(reversed(sizes), layer_of):
        names = list(block)
        size, in_layer = sum(sizes[name] for name in names), int(layer is not None)
        if not buckets or numel + size > most or layers + in_layer > LAYERS_PER_BUCKET:
            buckets.append([])
            layers = numel = 0
        buckets[-1] += names
        numel, layers = numel + size, layers + in_layer
    return buckets


def set_apart(buckets: Iterable[list[str]], some: Collection[str]) -> list[list[str]]:
    """Split each bucket in two: the names that are not in `some`, and the names in `some`. Drop
    empty buckets."""
    split = (([n for n in b if n not in some], [n for n in b if n in some]) for b in buckets)
    return [names for both in split for names in both if names]


def layer_of(parameter: str) -> str | None:
    """Return the layer prefix of a parameter's name, e.g. `layers.3` for `layers.3.mlp.down`.
    Return None for parameters outside layers."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else None


def default_step_groups(shard_numel: int) -> int:
    """Return the number of step groups for a rank with `shard_numel` elements in its shards.

    This is the smallest number of groups with at most `STEP_ELEMENTS` elements each, but at most
    four. With more groups, there are more and smaller stacks of matrices, and every stack repeats
    all of its rule's kernel launches.
    """
    return min(MOST_STEP_GROUPS, max(1, -(-shard_numel // STEP_ELEMENTS)))
