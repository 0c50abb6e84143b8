"""Which parameters share a bucket, and which buckets a step group: always consecutive ones."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from math import prod

from models.units import Unit

DEFAULT_BUCKET = 40_000_000
"""Elements."""
LAYERS_PER_BUCKET = 2
NEGLIGIBLE = 0.01
"""Share of a bucket's size by which small parameters, such as gains, may exceed it."""

STEP_ELEMENTS = 1 << 27
"""Elements of a rank that a step group has at most by default, where four groups allow it. Their
step takes about 24 bytes of scratch per element."""
MOST_STEP_GROUPS = 4


def bucket_parameters(units: Sequence[Unit], *, join_layers: bool = False) -> list[list[str]]:
    """Names of the parameters of each bucket, in backward order.

    Whole layers, and the parameters between them, are joined up to `bucket_numel` elements and two
    layers.
    """
    sizes = {unit.parameter: prod(unit.view_shape) for unit in units}
    most = bucket_numel(sizes, join_layers) * (1 + NEGLIGIBLE)
    buckets: list[list[str]] = []
    layers = numel = 0
    for layer, block in groupby(reversed(sizes), layer_of):
        names = list(block)
        size, own = sum(sizes[name] for name in names), int(layer is not None)
        if not buckets or numel + size > most or layers + own > LAYERS_PER_BUCKET:
            buckets.append([])
            layers = numel = 0
        buckets[-1] += names
        numel, layers = numel + size, layers + own
    return buckets


def set_apart(buckets: Iterable[list[str]], some: Collection[str]) -> list[list[str]]:
    """Split each bucket into its names outside of `some` and those in it, none empty, in order."""
    split = (([n for n in b if n not in some], [n for n in b if n in some]) for b in buckets)
    return [names for both in split for names in both if names]


def bucket_numel(sizes: dict[str, int], join_layers: bool) -> int:
    """Elements at which a bucket is closed.

    It is one layer, or 40M elements if a layer is smaller, but at most two layers. With
    `join_layers` it is always two layers, since more matrices can be packed more tightly.
    """
    layers = Counter[str]()
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] += size
    largest = max(layers.values(), default=DEFAULT_BUCKET)
    joined = LAYERS_PER_BUCKET * largest
    return joined if join_layers else min(max(largest, DEFAULT_BUCKET), joined)


def layer_of(parameter: str) -> str | None:
    """Prefix of the layer: `layers.3` of `layers.3.mlp.down`, None outside of the layers."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else None


def default_step_groups(shard_numel: int) -> int:
    """Return the number of step groups for a rank whose shards hold `shard_numel` elements.

    The fewest of at most four that have no more than `STEP_ELEMENTS` each: every further group
    makes a rank step more, and smaller, stacks of matrices, each with all launches of its rule.
    """
    return min(MOST_STEP_GROUPS, max(1, -(-shard_numel // STEP_ELEMENTS)))


def forward_groups(buckets: int, groups: int) -> list[tuple[int, ...]]:
    """Indices of the buckets of each step group, in forward order.

    Buckets are numbered in backward order. There are at most `groups` step groups, each of
    consecutive buckets, and their numbers of buckets differ by at most one.
    """
    order = range(buckets)[::-1]
    count = min(groups, buckets)
    return [tuple(order[buckets * i // count : buckets * (i + 1) // count]) for i in range(count)]
