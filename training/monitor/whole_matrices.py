"""Whole matrices of a layer, of which units are parts: q, k and v of all heads.

The PC paper's condition numbers are of these, and a head's says nothing about its matrix's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from models.units import Unit


class WholeMatrices:
    """Collector of units until all rows of their matrix are there.

    The units of one role in one parameter are rows of a matrix, whose order changes no singular
    value.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        """`units` are those of the model's stage, whichever rank has them."""
        whole = {unit.name: unit for unit in units if unit.is_matrix}
        self.sizes = Counter((unit.parameter, unit.role) for unit in whole.values())
        self._rows: dict[tuple[str, str], dict[str, Tensor]] = {}

    def begin(self) -> None:
        """Forget the parts of earlier steps."""
        self._rows.clear()

    def add(self, units: Iterable[Unit], weights: Tensor) -> Iterator[tuple[list[str], Tensor]]:
        """Add units with their `weights` `[units, rows, cols]`, and yield each matrix that is now
        whole, `[rows, cols]`, with the names of its units."""
        for unit, weight in zip(units, weights, strict=True):
            key = unit.parameter, unit.role
            if self.sizes[key] == 1:
                continue
            rows = self._rows.setdefault(key, {})
            rows[unit.name] = weight.clone()
            if len(rows) == self.sizes[key]:
                yield list(rows), torch.cat([*rows.values()])
                del self._rows[key]
