"""Assigns numbers to columns and to sums of columns, and records columns used together."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .weight_use import Use


class Sums(NamedTuple):
    """Sums or products, each of two columns. The results are numbered from `start`."""

    start: int
    end: int
    pairs: Tensor  # [columns, 2]
    beneath: frozenset[Use]  # the weights that these columns belong to
    terms: bool  # whether each pair comes from two tensors that were added

    def added(self, numbers: Tensor) -> Tensor:
        """Return the columns that occur in some, but not all, of the sums with the given numbers.

        A column that occurs in all of the sums only scales or shifts them.
        """
        pairs = self.pairs[numbers - self.start].T
        moving = [pair for pair in pairs if bool((pair != pair[0]).any())]
        return torch.cat(moving or [*pairs])

    def vectors(self, numbers: Tensor) -> list[Tensor]:
        """Split sums a_i + b_i into the vectors a and b. Return [] if two sums share a column."""
        pairs = self.pairs[numbers - self.start]
        separate = self.terms and len(numbers) > 1 and len(pairs.unique()) == pairs.numel()
        return [*pairs.T] if separate else []


class Columns:
    """Assigns each column the index of its first element in a weight, and each sum a new number.

    Columns that are used together are recorded in the weight's `Use`.
    """

    def __init__(self) -> None:
        self.records: list[Use | Sums] = []
        self.settled = set[tuple[Any, ...]]()
        self.sums: dict[tuple[Any, ...], Sums] = {}
        self.matrices: dict[int, Any] = {-1: None}  # no column

    @property
    def end(self) -> int:
        """The first unused number."""
        return self.records[-1].end if self.records else 0

    def record(self, number: Tensor | int) -> Use | Sums:
        return self.records[bisect_right(self.records, int(number), key=lambda r: r.start) - 1]

    def leaves(self, number: int) -> set[int]:
        """Return the columns in a sum; for a single column, return the column itself."""
        record = self.record(number)
        if isinstance(record, Use):
            return {number}
        return set().union(*map(self.leaves, record.pairs[number - record.start].tolist()))

    def matrix(self, number: int) -> Any:
        """Return an identifier for the weight and stack entry that a column belongs to.

        The identifier of a sum is the tuple of the summed columns' identifiers.
        """
        if number not in self.matrices:
            record = self.record(number)
            index = number - record.start
            self.matrices[number] = (
                (*map(self.matrix, record.pairs[index].tolist()),)
                if isinstance(record, Sums)
                else (record.start, index // record.strides[0] if record.stacked else 0)
            )
        return self.matrices[number]

    def adds_matrices(self, columns: Tensor, axis: int) -> bool:
        """Return whether an axis has several columns, each in a different weight or stack entry."""
        line = columns.movedim(axis, 0).flatten(1)[:, 0] if columns.ndim > 1 else columns
        vector = [*dict.fromkeys(line.long().tolist())]
        firsts = (vector[:2], vector)  # fast path: the first two usually belong to the same matrix
        return len(vector) > 1 and all(len({*map(self.matrix, v)}) == len(v) for v in firsts)

    def parts(self, numbers: Tensor) -> Iterator[tuple[Use | Sums, Tensor]]:
        """Yield (record, numbers) for each run of consecutive numbers with the same record."""
        while len(numbers):
            record = self.record(numbers[0])
            other = (numbers < record.start) | (numbers >= record.end)
            size = int(other.byte().argmax()) or len(numbers)
            yield record, numbers[:size]
            numbers = numbers[size:]

    def beneath(self, columns: Tensor | None) -> set[Use]:
        """Return the weights that the columns belong to."""
        if columns is None or not columns.numel():
            return set()
        record = self.record(columns.max())
        if float(columns.min()) >= record.start:
            return {*record.beneath}
        numbers = columns[columns >= 0].long().cpu().unique()
        return set[Use]().union(*(record.beneath for record, _ in self.parts(numbers)))

    def joined(self, first: Tensor, second: Tensor, terms: bool = False) -> Tensor:
        """Assign numbers to the elements of a sum or product of two tensors.

        `first` and `second` are the tensors' columns. `terms` means that the result is a sum.
        """
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        both = (low >= 0) & (low != high)
        if not bool(both.any()):
            return high
        (a, i), (b, j) = (s[both].unique(return_inverse=True) for s in (low, high))
        distinct, inverse = (i * len(b) + j).unique(return_inverse=True)
        pairs = torch.stack([a[distinct // len(b)], b[distinct % len(b)]], 1).long().cpu()
        key = (terms, *pairs.flatten().tolist())
        if key not in self.sums:
            one, two = map(self.beneath, pairs.T)
            self.sums[key] = Sums(
                self.end, self.end + len(pairs), pairs, frozenset(one | two), terms
            )
            self.records.append(self.sums[key])
            shifts = terms and (len(a) == 1) != (len(b) == 1)  # the same score for each column
            for use in one ^ two if not shifts else ():
                use.joined |= two if use in one else one
        return high.masked_scatter(both, (inverse + self.sums[key].start).double())

    def settle(self, rows: Tensor, kind: str, whole: bool = True) -> None:
        """Record that an operation uses each row of column numbers `[count, n]` as one vector.

        `whole` means that each row lists one number per element of the vector.
        """
        for row in rows.sort().values.unique(dim=0) if len(rows) > 1 else rows:
            used = row[row >= 0]
            numbers = used.unique()
            once = whole and len(numbers) == len(used)
            if (key := (kind, once, *numbers.tolist())) in self.settled:
                continue
            self.settled.add(key)
            parts, rest = [*self.parts(numbers)], list[Tensor]()
            sums = parts[0][0] if once and len(parts) == 1 else None
            if isinstance(sums, Sums) and (terms := sums.vectors(numbers)):
                self.settle(torch.stack(terms), kind)
                continue
            summed = set[Use]().union(*(r.beneath for r, _ in parts if isinstance(r, Sums)))
            for record, own in parts:
                if isinstance(record, Sums):
                    rest.append(record.added(own))
                elif record in summed:
                    rest.append(own)
                else:
                    record.sets[kind].add(tuple((own - record.start).tolist()))
            if rest:
                self.settle(torch.cat(rest)[None], kind, whole=False)

    def consume(self, columns: Tensor | None, axes: Iterable[int], kind: str) -> None:
        """Record that an operation uses each slice of `columns` along `axes` as one vector."""
        if columns is not None:
            last = {axis % columns.ndim for axis in axes}
            rest = [axis for axis in range(columns.ndim) if axis not in last]
            rows = columns.permute(*rest, *last).flatten(len(rest)) if last else columns[..., None]
            self.settle(rows.reshape(-1, rows.shape[-1]).long().cpu(), kind)

    def uses(self, elements: Tensor) -> Iterator[tuple[Use, Tensor]]:
        """Yield (weight, elements) for each run of consecutive elements in the same weight."""
        return ((use, own) for use, own in self.parts(elements) if isinstance(use, Use))
