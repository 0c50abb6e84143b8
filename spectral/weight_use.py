"""The use of a weight's outputs in a forward pass, and the division that it implies.

Two outputs belong to the same matrix if every set of outputs used as one vector contains either
both or neither. This is the coarsest division in which each set consists of whole matrices.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .division import Division

LAYER = "a layer"
INNER = "a matrix product of activations"
PRODUCT = "a product"
CHOICE = "a choice"
GROUP = "a group"
"""Kinds of operations that use outputs as one vector. "a product" is elementwise, or scales tokens,
as attention scales values."""


class Seen(NamedTuple):
    """A weight's division, and the reason for it."""

    division: Division | None  # None for AdamW
    reason: str
    decays: bool = True


Sets = frozenset[tuple[int, ...]]


@dataclass(eq=False)
class Use:
    """Records how a weight's outputs are used. The weight's elements are numbered from `start`."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    end: int
    used: bool = False
    looked_up: bool = False
    idle: bool = False  # a matmul with the weight had no rows, as for an expert without tokens
    joined: set["Use | None"] = field(default_factory=set)  # weights whose outputs are added to it
    tables: set["Use"] = field(default_factory=set)  # weights that this weight multiplies
    mixed: set["Use"] = field(default_factory=set)  # weights whose outputs it mixes over tokens
    returned: bool = False  # its outputs are the model's outputs
    in_loss: bool = False  # its outputs enter the loss or a norm
    hidden: str = ""  # the operation that hides the use of its outputs
    groups: int = 1  # of a transposed convolution
    inputs: set[tuple[int, ...]] = field(default_factory=set)  # axes that matmuls sum over
    outputs: set[int] = field(default_factory=set)  # output axes
    # Sets of columns by kind of operation; a column is identified by its first element's position.
    sets: dict[str, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))

    @property
    def beneath(self) -> frozenset["Use"]:
        """The weights that the columns belong to: only this weight."""
        return frozenset([self])

    @property
    def ended(self) -> bool:
        """Whether the outputs are the model's outputs or enter the loss."""
        return self.returned or self.in_loss

    @property
    def stacked(self) -> bool:
        """Whether the first axis enumerates matrices, such as experts."""
        return max(self.outputs, default=0) > 0 and not any(0 in axes for axes in self.inputs)

    def axes(self, numbers: Tensor) -> list[int]:
        """Return the axes along which the elements' positions differ."""
        return _changing(_places(numbers - self.start, self.shape, self.strides))

    def looks_up(self, numbers: Tensor, ordered: bool) -> bool:
        """Return whether the elements are the result of looking up whole rows.

        Selecting every row exactly once counts only if the rows are in the original order
        (`ordered`), as in a table of positions.
        """
        rows, *rest = _places(numbers.unique() - self.start, self.shape, self.strides)
        whole = [len(line.unique()) for line in rest] == [*self.shape[1:]]
        once = len(numbers) == prod(self.shape) == len(rows)
        return len(self.shape) == 2 and whole and (ordered or not once)

    def columns(self, numbers: Tensor, inputs: set[int], apart: bool = False) -> Tensor:
        """Record a matmul that sums over the axes `inputs`. Return each column's first element.

        `apart` only has an effect if the matmul uses a single stack entry: the returned elements
        are then in that entry instead of the first entry.
        """
        places = _places(numbers - self.start, self.shape, self.strides)
        outputs = [axis for axis in _changing(places) if axis not in inputs]
        self.inputs.add(tuple(sorted(inputs)))
        self.outputs.update(outputs)
        entry = [0] if apart and len(self.shape) > 2 and 0 not in (*inputs, *outputs) else []
        kept = entry + outputs
        return self.start + torch.tensor(self.strides)[kept] @ places[kept]

    def verdict(self, taken: set["Use | None"]) -> Seen:
        """Return the weight's division and the reason for it.

        Args:
            taken: the weights whose outputs are used by a matmul, and None. If `joined` contains
                None, the activations to which the outputs are added rule out an output head.

        Raises:
            ValueError: if the pass does not use the weight, drops its outputs or hides how they are
                used, or if no division matches the outputs' use.
        """
        if not self.used:
            raise ValueError("the forward pass did not use this weight")
        if self.sets.keys() >= {CHOICE, LAYER}:
            raise ValueError(
                "a layer uses this weight's outputs, but an operation such as topk also selects "
                "some of the outputs"
            )
        if CHOICE in self.sets:
            return Seen(None, "an operation chooses among its columns")
        if self.looked_up:
            return Seen(None, "its rows are looked up: a table", decays=False)
        if self.hidden:
            raise ValueError(f"{self.hidden} makes the use of this weight's outputs unclear")
        if self.idle and not self.inputs:
            raise ValueError("the forward pass multiplied no token by this weight")
        if not self.inputs:
            return Seen(None, "no product uses it: a table", decays=False)
        if not any(self.inputs) and 1 in self.shape[-2:]:
            return Seen(None, "each output has a single input: vectors", decays=False)
        entries = self._entries()
        self.sets = {kind: set().union(*(own[kind] for own in entries)) for kind in self.sets}
        windows = frozenset(self.sets.get(INNER, ()))
        steps = {b - a for window in windows for a, b in pairwise(sorted(window))}
        if _overlap(windows):
            if len(steps) == 1:
                reason = "windows of its outputs overlap: a table of positions"
                return Seen(None, reason, decays=False)
            counts = Counter(chain(*windows))
            if any(all(counts[column] > 1 for column in window) for window in windows):
                raise ValueError(
                    "matrix products of activations use overlapping sets of this weight's outputs"
                )
        cuts, grouped = [frozenset(self._cuts(own)) for own in entries], GROUP in self.sets
        layout = self.shape, self.strides, frozenset(self.inputs), frozenset(self.outputs)
        divisions = {_division(*layout, sets, grouped, self.groups) for sets in cuts}
        if len(divisions) > 1:
            raise ValueError("the matrices in this stack are divided in different ways")
        (division,) = divisions
        shapes = division.shapes(self.shape)
        scaled = PRODUCT in self.sets and not self.ended  # other layers use the products
        joined = set() if self.in_loss and not self.returned else self.joined
        reached = scaled or taken & {self, *joined}
        kinds = [INNER] if {*self.sets} == {INNER, PRODUCT} else [*self.sets]
        if reached and self.sets and all(len(s) == 1 for kind in kinds for s in self.sets[kind]):
            return Seen(None, "its columns are used one at a time: scalars")
        several = frozenset(columns for columns in chain(*cuts) if len(columns) > 1)
        crossed = self.outputs and not grouped and several
        single = [rows == 1 < inputs for rows, inputs in shapes]
        if crossed and (all(single) or (any(single) and _overlap(several))):
            raise ValueError(
                "this weight's outputs are combined along two axes, so some matrices would have a "
                "single output"
            )
        if not self.outputs or all(1 in shape for shape in shapes):
            return Seen(None, "its matrices have a side of 1: vectors", decays=False)
        used, count = set[int]().union(*chain.from_iterable(self.sets.values())), self.count
        if self.stacked and 0 in self.outputs:  # some entries may have no tokens
            count = count // self.shape[0] * len({c // self.strides[0] for c in used})
        if 0 < len(used) < count and not self.ended:
            raise ValueError(f"{count - len(used)} of this weight's {count} outputs are unused")
        if not (reached or self.ended):
            raise ValueError(
                "the forward pass neither used nor returned this weight's outputs, except perhaps "
                "in a mean or norm"
            )
        head = Seen(None, "its outputs reach no further layer: a head")
        return Seen(division, self._reason()) if reached else head

    @property
    def count(self) -> int:
        """Number of outputs."""
        return prod(self.shape[a] for a in self.outputs) * self.groups

    def _entries(self) -> list[dict[str, set[tuple[int, ...]]]]:
        """Return the sets of each stack entry if entries are used one by one, else all sets as one
        item.

        Each entry's columns are numbered like the columns of the first entry.
        """
        if not self.stacked or 0 in self.outputs:
            return [self.sets]
        entries = defaultdict[int, Any](lambda: defaultdict(set))
        for kind, sets in self.sets.items():
            for columns in sets:
                for entry, own in groupby(sorted(columns), lambda c: c // self.strides[0]):
                    start = entry * self.strides[0]
                    entries[entry][kind].add(tuple(column - start for column in own))
        return [*entries.values()] or [{}]

    def _cuts(self, own: Mapping[str, set[tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
        """Yield the sets of columns that divide the outputs.

        If any layer uses all outputs, layers that only use part of the outputs, such as blocks, do
        not divide the outputs. A set divides each group of which it contains at least two columns.
        """
        groups = own.get(GROUP, set())
        group = defaultdict(int, {c: i for i, columns in enumerate(groups) for c in columns})
        for kind, sets in own.items():
            whole = {columns for columns in sets if len(columns) == self.count}
            for columns in whole if kind == LAYER and whole else sets:
                ordered = groupby(sorted(columns, key=group.__getitem__), group.__getitem__)
                parts = (tuple(part) for _, part in ordered)
                yield from (p for p in parts if not groups or kind == GROUP or len(p) > 1)

    def _reason(self) -> str:
        taken = {kind: sorted({len(s) for s in sets}) for kind, sets in self.sets.items()}
        whole = [kind for kind, sizes in taken.items() if sizes == [self.count]]
        phrases = [
            f"{kind} uses {' and '.join(map(str, sizes[:4]))} columns at a time"
            for kind, sizes in sorted(taken.items(), key=lambda item: item[1])
            if kind not in whole
        ]
        if whole:
            phrases.append(f"{whole[0]} all" if phrases else f"{whole[0]} uses all columns")
        return ", ".join(phrases) or "the model returns a sum of its outputs"


def _places(elements: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return the positions `[axes, elements]` of elements numbered in memory order."""
    places = torch.zeros(len(shape), len(elements), dtype=torch.long)
    for axis in sorted(range(len(shape)), key=lambda a: -strides[a]):
        if shape[axis] > 1:
            places[axis], elements = elements // strides[axis], elements % strides[axis]
    return places


def _changing(places: Tensor) -> list[int]:
    """Return the axes along which the positions differ."""
    return [int(a) for a in (places != places[:, :1]).any(1).nonzero()]


@lru_cache(64)  # layers repeat within a model
def _overlap(sets: Sets) -> bool:
    """Return whether any two sets overlap without one containing the other."""
    smallest = dict[int, int]()  # for each column, the smallest set so far that contains it
    for i, columns in enumerate(sorted(sets, key=len, reverse=True)):
        if len({smallest.get(column) for column in columns}) > 1:
            return True
        smallest.update(dict.fromkeys(columns, i))
    return False


@lru_cache(64)
def _division(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    sums: Sets,
    outputs: frozenset[int],
    sets: Sets,
    grouped: bool,
    groups: int,
) -> Division:
    """Return the division implied by the matmuls' axes and the sets of columns.

    Raises ValueError if no division matches.
    """
    if not outputs:
        return Division()
    axis, inputs = max(outputs), set[int]().union(*sums)
    stacked = axis > 0 and 0 not in inputs
    transposed = any(a < axis for a in inputs)
    others = {a for a, n in enumerate(shape) if n > 1} - inputs - {axis}
    others -= {0} if stacked else set()
    if len(sums) > 1 or others or axis != stacked + transposed or axis in inputs:
        shown = " and ".join(map(str, sorted(sums)))
        raise ValueError(
            f"matrix products sum over the axes {shown} of this weight of shape {shape}; no "
            "division into matrices matches this use"
        )
    groups = groups if transposed else 1
    parts = shape[0] if stacked and 0 in outputs else groups
    each, size, rows = shape[0] // parts, shape[axis], []
    for columns in sets:
        places = _places(torch.tensor(columns), shape, strides)
        part = places[0] // each if parts > 1 else 0
        rows.append({*(places[axis] + size * part).tolist()})
    # A column used alone may still belong to a larger matrix, unless it forms a group.
    joint = [r for r in rows if len(r) > 1 or grouped]
    finest = _labels(rows, parts * size)
    labels = finest if len(joint) == len(rows) else _labels(joint, parts * size)
    if stacked and rows:  # entries without tokens follow the pattern of the others
        seen = sorted({i // size for row in rows for i in row})
        parts, kept = len(seen), [i for p in seen for i in range(p * size, (p + 1) * size)]
        labels, finest = [labels[i] for i in kept], [finest[i] for i in kept]
    stride, lengths = _pattern(labels, finest, parts)
    return Division(
        rows=lengths, transposed=transposed, stacked=stacked, stride=stride, groups=groups
    )


def _labels(sets: Iterable[set[int]], size: int) -> list[int]:
    """Return, for each output, the first output that is in exactly the same sets."""
    members = [list[int]() for _ in range(size)]
    for number, indices in enumerate(sets):
        for i in indices:
            members[i].append(number)
    first = dict[tuple[int, ...], int]()
    return [first.setdefault(tuple(numbers), i) for i, numbers in enumerate(members)]


def _pattern(labels: list[int], finest: list[int], parts: int) -> tuple[int, tuple[int, ...]]:
    """Return the stride and row counts of the matrices in `labels`.

    Raises ValueError if no stride gives equal row counts in all `parts`.
    """
    size = len(labels) // parts
    for stride in (n for n in range(1, size + 1) if size % n == 0):
        runs, rows = [], set()
        for start in (p * size + j for p in range(parts) for j in range(stride)):
            strided = range(start, (start // size + 1) * size, stride)
            own = [[*run] for _, run in groupby(strided, labels.__getitem__)]
            rows.add(tuple(map(len, own)))
            runs += [{finest[i] for i in run} for run in own]
        if parts > stride == 1 < len(rows):
            raise ValueError("the matrices in this stack are divided in different ways")
        if len(rows) > 1:
            continue
        (lengths,) = rows
        counts = Counter(label for run in runs for label in run)
        whole = [all(counts[label] == 1 for label in run) for run in runs]
        # If heads are consecutive, a vector shared by all heads is divided too.
        period = _period([*zip(lengths, whole, strict=False)])
        if all(whole) or (stride == 1 and period < len(lengths) and any(whole[:period])):
            return stride, lengths[: _period(lengths)] if len(lengths) > 1 else ()
    found = [[i for i, x in enumerate(labels) if x == label] for label in dict.fromkeys(labels)]
    shown = ", ".join(str(outputs[:8]) for outputs in found[:4])
    raise ValueError(
        f"the outputs in each matrix must have a constant stride, got matrices of outputs {shown}"
    )


def _period(values: Any) -> int:
    """Return the length of the shortest prefix that generates the values by repetition."""
    count = len(values)
    periods = (n for n in range(1, count) if count % n == 0)
    return next((n for n in periods if values == values[:n] * (count // n)), count)
