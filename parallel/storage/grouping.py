"""Which parameters share a bucket: consecutive in backward order, at most two layers."""

from collections.abc import Collection, Iterable, Sequence
from math import prod

from models.units import Unit

DEFAULT_BUCKET = 40_000_000
LAYERS_PER_BUCKET = 2
NEGLIGIBLE = 0.01
"""Share of a bucket's size by which gains and the like may exceed it."""


def units_by_parameter(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    """The units of each parameter, parameters in forward order."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.parameter, []).append(unit)
    for name, members in found.items():
        sizes = {prod(unit.view_shape) for unit in members}
        if len(sizes) > 1:
            raise ValueError(f"units of {name} must agree about its size, got {sorted(sizes)}")
    return found


def bucket_parameters(
    units: Sequence[Unit], bucket_numel: int | None, *, join_layers: bool = False
) -> list[list[str]]:
    """Names of the parameters of each bucket, in backward order.

    Whole layers, or what lies outside of them, are joined up to `bucket_numel` elements and two
    layers; what is larger by itself is split between its parameters.
    """
    sizes = {unit.parameter: prod(unit.view_shape) for unit in units}
    limit = default_bucket_numel(sizes, join_layers) if bucket_numel is None else bucket_numel
    groups: list[list[str]] = []
    layers = numel = 0
    most = limit * (1 + NEGLIGIBLE)
    for layer, names in _blocks(reversed(list(sizes))):
        size = sum(sizes[name] for name in names)
        if groups and numel + size <= most and layers + (layer is not None) <= LAYERS_PER_BUCKET:
            groups[-1] += names
            numel, layers = numel + size, layers + (layer is not None)
            continue
        pieces = _split(names, sizes, limit)
        groups += pieces
        numel = sum(sizes[name] for name in pieces[-1])
        layers = 0 if layer is None else 1
    return groups


def set_apart(groups: Iterable[list[str]], some: Collection[str]) -> list[list[str]]:
    """The groups in order, those that have both cut in names outside of `some` and names in it."""
    cut = (([n for n in g if n not in some], [n for n in g if n in some]) for g in groups)
    return [part for parts in cut for part in parts if part]


def default_bucket_numel(sizes: dict[str, int], join_layers: bool) -> int:
    """Elements of a bucket if none are given: a layer, or 40M if that is less than two layers; with
    `join_layers` always two layers, since matrices are packed the better the more there are."""
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + size
    largest = max(layers.values(), default=DEFAULT_BUCKET)
    joined = LAYERS_PER_BUCKET * largest
    return joined if join_layers else min(max(largest, DEFAULT_BUCKET), joined)


def layer_of(parameter: str) -> str | None:
    """`layers.3` of `layers.3.mlp.down`; None outside of the layers."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else None


def _blocks(names: Iterable[str]) -> list[tuple[str | None, list[str]]]:
    """Consecutive names of one layer each, or of none."""
    blocks: list[tuple[str | None, list[str]]] = []
    for name in names:
        layer = layer_of(name)
        if not blocks or blocks[-1][0] != layer:
            blocks.append((layer, []))
        blocks[-1][1].append(name)
    return blocks


def _split(names: list[str], sizes: dict[str, int], limit: int) -> list[list[str]]:
    """`names` in consecutive lists of at most `limit` elements or a single parameter, to which
    negligible ones are added."""
    found: list[list[str]] = []
    numel = 0
    for name in names:
        tiny = sizes[name] <= NEGLIGIBLE * limit
        if not found or (numel + sizes[name] > limit and not tiny):
            found.append([])
            numel = 0
        found[-1].append(name)
        numel += sizes[name]
    return found


def forward_groups(buckets: int, groups: int) -> list[tuple[int, ...]]:
    """Bucket indices in forward order (buckets are numbered in backward order), in at most `groups`
    consecutive runs of nearly equal length."""
    order = range(buckets)[::-1]
    count = min(groups, buckets)
    return [tuple(order[buckets * i // count : buckets * (i + 1) // count]) for i in range(count)]
