"""The units of a model with their rules, those that differ in nothing else in one row."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from parallel.optimizer.routing import Route
from training.report.table import table

MOST_ROWS: Final = 3
"""Rows of a role; one with more kinds of units, such as a rate for each layer, has one row."""


@dataclass
class UnitGroup:
    """Units that differ in nothing but layer and number."""

    routes: list[Route] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """Parameters of all."""
        return sum(prod(route.shape) for route in self.routes)

    def column(self, name: str, form: str = "") -> str:
        """Return a figure of the routes, or the range of it if they differ; nothing if none."""
        values: list[Any] = [v for r in self.routes if (v := getattr(r, name)) is not None]
        shown = [format(value, form) for value in (sorted(values) if values else [])]
        return " to ".join(dict.fromkeys([shown[0], shown[-1]])) if shown else ""


def unit_table(routes: Sequence[Route]) -> str:
    """Return a row for all matrices of the same role, shape, rule, rates and radius."""
    groups: dict[tuple[object, ...], UnitGroup] = {}
    for route in routes:
        shape = route.shape if len(route.shape) > 1 else ()  # vectors of any size are one row
        key = (route.role, shape, route.rule, route.lr, route.weight_decay, route.pc)
        groups.setdefault((*key, route.penalty), UnitGroup()).routes.append(route)
    by_role: dict[str, list[UnitGroup]] = {}
    for (role, *_), group in groups.items():
        by_role.setdefault(str(role), []).append(group)
    rows = []
    for kinds in by_role.values():
        if len(kinds) > MOST_ROWS:
            kinds = [UnitGroup([route for group in kinds for route in group.routes])]
        # The first row has most units, the others are the exceptions.
        for group in sorted(kinds, key=lambda group: -len(group.routes)):
            rows.append(_row(group))
    total = ("total", f"{len(routes):,}", "", f"{UnitGroup(list(routes)).elements:,}")
    header = (
        "units", "number", "shape", "parameters", "rule", "lr", "decay", "radius", "scale", "pc",
        "penalty",
    )  # fmt: skip
    rows.append((*total, *[""] * (len(header) - len(total))))
    used = [i for i, name in enumerate(header) if any(row[i] for row in rows)]
    return table([header[i] for i in used], [[row[i] for i in used] for row in rows])


def _row(group: UnitGroup) -> tuple[str, ...]:
    shapes = sorted({route.shape for route in group.routes})
    shown = ["x".join(map(str, shape)) for shape in shapes]
    return (
        where(route.unit for route in group.routes),
        f"{len(group.routes):,}",
        " to ".join(dict.fromkeys([shown[0], shown[-1]])),
        f"{group.elements:,}",
        " and ".join(dict.fromkeys(route.rule for route in group.routes)),
        group.column("lr", ".3g"),
        group.column("weight_decay", ".3g"),
        group.column("radius", ".4g"),
        group.column("scale", ".4g"),
        group.column("pc"),
        group.column("penalty", "g"),
    )


def where(names: Iterable[str]) -> str:
    """Name units in short, such as `layers 0-17 x q 0-15` for `layers.0.q.0` and following."""
    layers: set[int] = set()
    numbers: set[int] = set()
    words: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        if parts[0] == "layers":
            layers.add(int(parts[1]))
            parts = parts[2:]
        numbers.update(int(part) for part in parts if part.isdecimal())
        words[" ".join(part for part in parts if not part.isdecimal())] = None
    listed = list(words) if len(words) <= MOST_ROWS else [*list(words)[:2], "..."]
    text = ", ".join(listed) + (f" {ranges(numbers)}" if numbers else "")
    return f"layers {ranges(layers)} x {text}" if layers else text


def ranges(numbers: Collection[int]) -> str:
    """Write numbers in short: `0-3 5 7-8`; of many ranges the first two."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{a}-{b}" if b > a else str(a) for a, b in runs]
    return " ".join(shown if len(shown) <= MOST_ROWS else [*shown[:2], "..."])
