"""Parameters that share a bucket, and buckets that share a step group.

Buckets and step groups consist of consecutive parameters and buckets.
"""

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


def bucket_parameters(units: Sequence[Unit]) -> list[list[str]]:
    """Names of the parameters of each bucket, in backward order.

    Whole layers, and the parameters between them, are joined up to `bucket_numel` elements and two
    layers.
    """
    sizes = {unit.parameter: prod(unit.view_shape) for unit in units}
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
    """Split each bucket into its names outside of `some` and those in it, none empty, in order."""
    split = (([n for n in b if n not in some], [n for n in b if n in some]) for b in buckets)
    return [names for both in split for names in both if names]


def bucket_numel(sizes: dict[str, int]) -> int:
    """Elements at which a bucket is closed.

    It is one layer, or 40M elements if a layer is smaller, but at most two layers.
    """
    layers = Counter[str]()
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] += size
    largest = max(layers.values(), default=DEFAULT_BUCKET)
    return min(max(largest, DEFAULT_BUCKET), LAYERS_PER_BUCKET * largest)


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
