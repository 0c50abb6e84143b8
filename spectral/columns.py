"""Numbers for the columns of weights and for sums of columns, and records of their joint use."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .weight_use import Use


class Sums(NamedTuple):
    """Sums of two columns, numbered from `start` on."""

    start: int
    end: int
    pairs: Tensor  # [columns, 2]
    beneath: frozenset[Use]  # the weights of these columns

    def added(self, rows: Tensor) -> Tensor:
        """Return the columns that each row of sums adds, `[rows, n]`.

        A column in all sums of each row only scales or shifts the row, and is left out.
        """
        pairs = self.pairs[rows - self.start]
        moving = [i for i in (0, 1) if bool((pairs[..., i] != pairs[:, :1, i]).any())]
        return pairs[..., moving or [0, 1]].flatten(1)


class Columns:
    """Numbers for the elements of weights, which identify columns, and for sums of columns.

    Joint use is recorded in the weights' `Use`.
    """

    def __init__(self) -> None:
        self.records: list[Use | Sums] = []
        self.starts: list[int] = []
        self.settled = set[tuple[str, int, tuple[int, ...]]]()
        self.sums: dict[tuple[int, ...], Sums] = {}
        self.matrices: dict[int, Any] = {-1: None}  # no column

    @property
    def end(self) -> int:
        """The first unused number."""
        return self.records[-1].end if self.records else 0

    def add(self, record: Use | Sums) -> None:
        self.records.append(record)
        self.starts.append(record.start)

    def record(self, number: Tensor | int) -> Use | Sums:
        return self.records[bisect_right(self.starts, int(number)) - 1]

    def matrix(self, number: int) -> Any:
        """Return an identifier of the weights, and of the entries of stacks, of a column."""
        if number not in self.matrices:
            record, entry = self.record(number), 0
            if isinstance(record, Sums):
                pair = record.pairs[number - record.start].tolist()
                self.matrices[number] = (*map(self.matrix, pair),)
            else:
                if record.stacked:
                    entry = (number - record.start) // record.strides[0]
                self.matrices[number] = record.start, entry
        return self.matrices[number]

    def parts(self, numbers: Tensor) -> Iterator[tuple[Use | Sums, Tensor]]:
        """Yield the record of each run of consecutive numbers, with these numbers."""
        while len(numbers):
            record = self.record(numbers[0])
            other = (numbers < record.start) | (numbers >= record.end)
            size = int(other.byte().argmax()) or len(numbers)
            yield record, numbers[:size]
            numbers = numbers[size:]

    def beneath(self, columns: Tensor | None) -> set[Use]:
        """Return the weights of columns."""
        if columns is None or not columns.numel():
            return set()
        record = self.record(columns.max())
        if float(columns.min()) >= record.start:
            return {*record.beneath}
        numbers = columns[columns >= 0].long().cpu().unique()
        return set[Use]().union(*(record.beneath for record, _ in self.parts(numbers)))

    def join(self, columns: Tensor, others: Iterable[Use | None]) -> None:
        for use in self.beneath(columns):
            use.joined.update(others)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Return numbers for places whose values depend on the columns of both arguments."""
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        both = (low >= 0) & (low != high)
        if not bool(both.any()):
            return high
        sides = low[both], high[both]
        (_, a), (_, b) = (side.unique(return_inverse=True) for side in sides)
        distinct, places = (a * (b.max() + 1) + b).unique(return_inverse=True)
        pairs = torch.empty(len(distinct), 2, dtype=torch.long)
        pairs[places.cpu()] = torch.stack(sides, 1).long().cpu()
        key = tuple(pairs.flatten().tolist())
        if key not in self.sums:
            uses = [self.beneath(side) for side in sides]
            self.sums[key] = Sums(self.end, self.end + len(pairs), pairs, frozenset().union(*uses))
            self.add(self.sums[key])
            for own, other in (uses, uses[::-1]):
                for use in own - other:
                    use.joined |= other
        return high.masked_scatter(both, (places + self.sums[key].start).double())

    def settle(self, rows: Tensor, kind: str) -> None:
        """Record that an operation uses the columns of each row, `[rows, n]`, as one vector."""
        if (key := (kind, len(rows), tuple(rows.flatten().tolist()))) in self.settled:
            return
        self.settled.add(key)
        rows = rows.sort().values.unique(dim=0) if len(rows) > 1 else rows.unique()[None]
        low, high = map(int, rows.aminmax())
        record = self.record(low)
        inside = low >= 0 and high < record.end
        if inside and isinstance(record, Use):
            sets = (rows - record.start).tolist()
            return record.sets[kind].update(tuple(dict.fromkeys(columns)) for columns in sets)
        if inside and isinstance(record, Sums):
            self.settle(record.added(rows), kind)
        elif len(rows) > 1:
            for row in rows:
                self.settle(row[None], kind)
        else:
            parts, rest = [*self.parts(rows[rows >= 0].unique())], list[Tensor]()
            summed = set[Use]().union(*(r.beneath for r, _ in parts if isinstance(r, Sums)))
            for record, numbers in parts:
                if isinstance(record, Sums):
                    rest.append(record.added(numbers[None])[0])
                elif record in summed:
                    rest.append(numbers)
                else:
                    record.sets[kind].add(tuple((numbers - record.start).tolist()))
            if rest:
                self.settle(torch.cat(rest)[None], kind)

    def consume(self, columns: Tensor | None, axes: Iterable[int], kind: str) -> None:
        """Record the joint use of the columns in every vector along some axes."""
        if columns is None:
            return
        last = {axis % columns.ndim for axis in axes}
        rest = [axis for axis in range(columns.ndim) if axis not in last]
        rows = columns.permute(*rest, *last).reshape(prod(columns.shape[a] for a in rest), -1)
        self.settle(rows.long().cpu(), kind)

    def uses(self, elements: Tensor) -> Iterator[tuple[Use, Tensor]]:
        """Yield the weights of elements, as in `parts`."""
        return ((use, own) for use, own in self.parts(elements) if isinstance(use, Use))
