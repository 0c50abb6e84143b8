"""The layouts and modes supported by each model family, for docs/parallelism.md.

Cells rejected by the config checks contain the error. All other cells are trained on four ranks in
tests/distributed/test_support.py. `make pages` updates the page.
"""

import re
import tempfile
from itertools import product
from typing import Any

from models.families import FAMILIES as ALL
from tests.paths import with_table
from tests.run_configs import tiny_config
from tests.tiny_families import SAME_LAYERS, overrides, settings
from training.config import InvalidConfigError, check

RANKS = 4

SHAPE = {
    "model__layers": 4,
    "model__hidden": 32,
    "model__ffn": 32,
    "model__kv_heads": 4,
    "train__global_batch": 4,
    "train__micro_batch": 1,
    "train__sequence_length": 16,
    "train__exit_step": 2,
}
FAMILIES = tuple(name for name in ALL if name not in SAME_LAYERS)
"""Families with their own layers, which form the columns."""

MODES: dict[str, dict[str, Any]] = {
    "`sequence: false`": {"parallel__sequence": False},
    "first stage 1 layer": {"parallel__first_stage_layers": 1},
    "recompute selective": {"train__recompute": "selective"},
    "recompute full": {"train__recompute": "full"},
    "compile": {"train__compile": "aot_eager"},
    "bf16": {"train__precision": "bf16"},
    "fp8 on `sdpa`": {"train__precision": "bf16", "train__fp8": "hybrid"},
}
"""Row options other than axis sizes."""


def row_of(name: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the layout and the changed keys specified by a row's name."""
    layout, changes = {}, {}
    for part in re.split("[,;] ", name):
        if part in MODES:
            changes |= MODES[part]
        elif not part.startswith("data "):
            axis, size = part.rsplit(" ", 1)
            axis = "virtual_pipeline" if axis == "virtual" else axis.replace(" ", "_")
            layout[axis] = int(size)
    return layout, changes


ROWS = {
    name: row_of(name)
    for name in (
        "data 4",
        "tensor 2",
        "tensor 2, `sequence: false`",
        "pipeline 4",
        "pipeline 2",
        "pipeline 2, virtual 2",
        "pipeline 2, first stage 1 layer",
        "pipeline 2, virtual 2, first stage 1 layer",
        "context 2",
        "expert 4",
        "expert 2",
        "expert tensor 2",
        "expert tensor 4",
        "expert 2, expert tensor 2",
        "tensor 2, pipeline 2",
        "tensor 2, pipeline 2, virtual 2",
        "tensor 2, context 2",
        "tensor 2, expert 4",
        "tensor 2, expert 2, expert tensor 2",
        "pipeline 2, virtual 2, expert tensor 2",
        "context 2, expert tensor 2",
        "pipeline 2, context 2",
        "pipeline 2, virtual 2, expert 2",
        "context 2, expert 4",
        "tensor 2, pipeline 2, expert 2",
        "pipeline 2, context 2, expert 2",
        "tensor 2, pipeline 2; recompute selective",
        "tensor 2, context 2; recompute full",
        "pipeline 2, virtual 2; recompute full",
        "tensor 2, pipeline 2, virtual 2; compile",
        "context 2, expert tensor 2; compile, recompute full",
        "tensor 2, pipeline 2; bf16",
        "tensor 2, expert 2; bf16, recompute full",
        "data 4; fp8 on `sdpa`",
    )
}
"""Layout and changed keys of each row."""


def keys_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys for a tiny run of a family, with changes."""
    return SHAPE | overrides(settings(family)) | changes


def cells() -> dict[tuple[str, str], str]:
    """Return the error for each (row, family), or "" if the combination is supported."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            (row, family): refusal(folder, family, row) for row, family in product(ROWS, FAMILIES)
        }


def refusal(folder: str, family: str, row: str) -> str:
    """Return the error that the checks report for a cell, without its values."""
    layout, changes = ROWS[row]
    placed = {f"parallel__{key}": value for key, value in layout.items()}
    try:
        check(tiny_config(folder, "muon", **keys_of(family, changes), **placed), RANKS)
    except InvalidConfigError as error:
        said = re.sub(r", got .*", "", error.problems[0])
        return said.replace(f"model.family {family}", "model.family FAMILY")
    return ""


def table() -> str:
    """Return the page's table, followed by the errors."""
    found = cells()
    sentences = list(dict.fromkeys(said for said in found.values() if said))
    heads: dict[tuple[str, ...], list[str]] = {}  # families grouped by identical columns
    for family in FAMILIES:
        heads.setdefault(tuple(found[row, family] for row in ROWS), []).append(column(family))
    lines = [
        f"| on {RANKS} ranks | " + " | ".join(map(", ".join, heads.values())) + " |",
        "|" + "---|" * (len(heads) + 1),
    ]
    for row, refusals in zip(ROWS, zip(*heads, strict=True), strict=True):
        marks = [f"error ({sentences.index(said) + 1})" if said else "runs" for said in refusals]
        lines.append(f"| {row} | " + " | ".join(marks) + " |")
    notes = [f"{i}. `{said}`" for i, said in enumerate(sentences, 1)]
    return "\n".join([*lines, "", *notes]) + "\n"


def column(family: str) -> str:
    """Return a column header: the family, and other families with the same layers."""
    same = [name for name, other in SAME_LAYERS.items() if other == family]
    return ", ".join([family, *same])


if __name__ == "__main__":
    print(with_table("parallelism.md", "support", table()), end="")
