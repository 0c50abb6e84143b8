"""The bucket layout: positions of parameters in the flat buckets of data parallelism.

A bucket is one flat buffer, divided into `ranks` equal shards. Data-parallel rank r owns the
elements `[r * shard, (r + 1) * shard)`. A parameter is one contiguous range of one bucket. Buckets
are in the order in which the backward pass completes gradients, last layer first. Parameters are
adjacent, without gaps. A shard boundary may divide a unit. The unit's momentum is then sent to one
rank.

If all units of a parameter are PC layers, their owners store W, and no rule updates the shards.
Such parameters have separate buckets, whose shards need no float32 master weights. An embedding on
two pipeline stages also has a separate bucket, so that both stages have equal shards.

The layout is a pure function of the units' shapes and is the same on every rank.
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
"""Default size of a bucket in elements."""
LAYERS_PER_BUCKET = 2
NEGLIGIBLE = 0.01
"""Share by which small parameters, such as gains, may enlarge a bucket beyond its limit."""

STEP_ELEMENTS = 1 << 27
"""Default limit on a rank's elements in a step group, if four groups suffice. A step uses about 24
bytes of scratch memory per element."""
MOST_STEP_GROUPS = 4
GOLDEN = 618
"""The golden ratio modulo 1, in thousandths; its multiples modulo 1 are evenly distributed."""
WORD = 8
"""Number of elements that a kernel reads at once: 16 bytes of bfloat16."""
ALIGNMENT_PADDING = 0.005
"""If padding for alignment would exceed this share of a bucket, the alignment is halved."""


@dataclass(frozen=True)
class Slot:
    """The range `[offset, offset + numel)` of a bucket that one parameter occupies."""

    parameter: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One flat buffer.

    index               position among the buckets
    slots               slots of its parameters, by offset
    numel               elements with padding, a multiple of the number of ranks
    stepped_by_owners   whether owners store the weights of all units in the bucket, so that no rule
                        updates the shards
    """

    index: int
    slots: tuple[Slot, ...]
    numel: int
    stepped_by_owners: bool = False

    @property
    def used(self) -> int:
        """Number of elements without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Number of padding elements."""
        return self.numel - self.used


@dataclass(frozen=True)
class Span:
    """A contiguous range `[start, start + length)` of a bucket that is a part of a unit.

    piece_start   position of the first element in the unit's flattened local piece
    """

    bucket: int
    start: int
    length: int
    piece_start: int


@dataclass(frozen=True)
class BucketLayout:
    """The buckets of a rank's parameters, the same on all ranks of a pipeline stage.

    ranks   number of data-parallel ranks, each with one shard of every bucket
    """

    ranks: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def slots(self) -> dict[str, tuple[Bucket, Slot]]:
        """The bucket and slot of each parameter, in the order of the buckets."""
        return {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}

    def spans(self, unit: Unit) -> tuple[Span, ...]:
        """Return the spans of the unit's local piece, in the row-major order of
        `unit.view(parameter)`.

        Raises KeyError for a unit whose parameter has no slot.
        """
        bucket, slot = self.slots[unit.parameter]
        spans, position = [], 0
        for start, length in local_ranges(unit):
            spans.append(Span(bucket.index, slot.offset + start, length, position))
            position += length
        return tuple(spans)

    def cuts(self, unit: Unit) -> list[tuple[int, Span]]:
        """Divide `spans(unit)` at shard boundaries. Return (data-parallel rank, span) by ascending
        rank.

        `start` is still relative to the beginning of the bucket.
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
        """Return the spans of a unit in the shard of data-parallel rank `rank`."""
        return tuple(span for other, span in self.cuts(unit) if other == rank)

    def holders(self, unit: Unit) -> dict[int, int]:
        """Return the number of elements of the unit's local piece in the shard of each
        data-parallel rank, by ascending rank, without ranks that have none."""
        counts: dict[int, int] = {}
        for rank, span in self.cuts(unit):
            counts[rank] = counts.get(rank, 0) + span.length
        return counts

    def shard_elements(self, weighted: Iterable[tuple[Unit, int]]) -> list[int]:
        """Return, for each data-parallel rank, the sum over units of weight times elements in the
        rank's shard."""
        # Add differences between adjacent ranks, so that the time per unit does not depend on the
        # number of ranks.
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
        """Return the number of elements in a shard of bucket number `bucket`."""
        return self.buckets[bucket].numel // self.ranks

    def step_groups(self, count: int | None) -> list[tuple[int, ...]]:
        """Return the bucket indices of each of at most `count` step groups, in forward order.

        If `count` is None, it is `default_step_groups` of a rank's shards.
        """
        chosen = default_step_groups(self.numel // self.ranks) if count is None else count
        return forward_groups(len(self.buckets), chosen)

    @property
    def numel(self) -> int:
        """Number of elements of all buckets, including padding."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Number of padding elements of all buckets."""
        return sum(bucket.padding for bucket in self.buckets)


def local_ranges(unit: Unit) -> list[tuple[int, int]]:
    """Return `(start, length)` of each contiguous range of the unit in its flattened local
    parameter.

    The ranges are in the row-major order of `unit.view(parameter)`, and depend only on shapes.
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
    """Bucket planner for one rank's pipeline stage.

    Attributes:
        ranks: data-parallel size.
        alignment: number of elements of which a shard's size is a multiple. The number is halved,
            down to 8, for a bucket that would otherwise need more than half a percent of padding.
        parameter_bytes: bytes per element in the all-gather.
        preconditioned: function that returns whether a unit is a PC layer whose owner stores W;
            used only for parameters narrower than float32, because wider parameters need no master
            weights.
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
        """Lay out parameters by their sizes, given in backward order."""
        slots, offset, names = [], 0, list(sizes)
        word = min(WORD, self.alignment)  # of the starts of parameters, as far as sizes allow
        # Layers have the same parameters. Each bucket starts with a different parameter, so that
        # parameters with much state or work are not always in the same rank's shard.
        first = index * GOLDEN % 1000 * len(names) // 1000
        ordered = names[first:] + names[:first]
        # Gammas, one number per unit, are last: parameters after them would not be aligned to 16
        # bytes.
        for name in sorted(ordered, key=lambda name: sizes[name] % word > 0):
            slots.append(Slot(name, offset, sizes[name]))
            offset += sizes[name]
        step = self._step(offset)
        return Bucket(index, tuple(slots), -(-offset // step) * step, stepped_by_owners)

    def _step(self, used: int) -> int:
        """Return the alignment, in elements, of the size of a bucket with `used` elements."""
        alignment = self.alignment
        while -used % (self.ranks * alignment) > ALIGNMENT_PADDING * used and alignment > WORD:
            alignment //= 2
        return self.ranks * alignment


def bucket_parameters(sizes: dict[str, int]) -> list[list[str]]:
    """Return the parameter names of each bucket, in backward order, given the number of elements of
    each parameter in forward order.

    A bucket has at most two layers and about `bucket_numel` elements, or one larger run of other
    parameters.
    """
    most = bucket_numel(sizes) * (1 + NEGLIGIBLE)
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
    """Split each bucket into names not in `some` and names in `some`, without empty buckets."""
    split = (([n for n in b if n not in some], [n for n in b if n in some]) for b in buckets)
    return [names for both in split for names in both if names]


def bucket_numel(sizes: dict[str, int]) -> int:
    """Return the limit on the number of elements in a bucket.

    The limit is the size of the largest layer or, if larger, 40M elements, but at most twice the
    size of the largest layer.
    """
    layers = Counter[str]()
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] += size
    largest = max(layers.values(), default=DEFAULT_BUCKET)
    return min(max(largest, DEFAULT_BUCKET), LAYERS_PER_BUCKET * largest)


def layer_of(parameter: str) -> str | None:
    """Return the prefix of the layer, e.g. `layers.3` for `layers.3.mlp.down`, or None outside
    layers."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else None


def default_step_groups(shard_numel: int) -> int:
    """Return the number of step groups for a rank with `shard_numel` elements in its shards.

    The result is the smallest number with at most `STEP_ELEMENTS` elements per group, but at most
    four. More groups mean more and smaller stacks of matrices, and each stack needs all launches of
    its rule.
    """
    return min(MOST_STEP_GROUPS, max(1, -(-shard_numel // STEP_ELEMENTS)))


def forward_groups(buckets: int, groups: int) -> list[tuple[int, ...]]:
    """Return the bucket indices of each step group, in forward order.

    Buckets are numbered in backward order. Each of the at most `groups` step groups consists of
    consecutive buckets, and the numbers of buckets per group differ by at most one.
    """
    order = range(buckets)[::-1]
    count = min(groups, buckets)
    return [tuple(order[buckets * i // count : buckets * (i + 1) // count]) for i in range(count)]
