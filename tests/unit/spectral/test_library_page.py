"""docs/library.md: its snippets run under the name of the wheel, and its tables are true."""

import importlib
import re
import sys

import pytest

import spectral
from spectral.parameter_split import FUSED
from tests.paths import ROOT


def test_snippets_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spectrain", importlib.import_module("spectral"))
    page = (ROOT / "docs" / "library.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 5
    namespace: dict[str, object] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, "docs/library.md", "exec"), namespace)
    assert "12 of 8x32" in str(namespace["split"])


def test_rates_that_transfer_are_those_of_the_losses() -> None:
    """The table is rebuilt from the losses of docs/width_transfer.md."""
    losses = re.findall(r"```\n(.*?)```", (ROOT / "docs/width_transfer.md").read_text(), re.DOTALL)[
        0
    ]
    names = {"SSO": "SpectralSphere", "Muon++": "MuonPlusPlus"}
    wanted = []
    for table in losses.strip().split("\n\n"):
        (name, *rates), *rows = (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())
        cells = [[float(cell.rstrip("*")) for cell in row[1:]] for row in rows]
        best = [float(rates[row.index(min(row))]) for row in cells]
        factor = max(best) / best[0]
        verdict = {1: "transfers", 2: "within a factor of two"}[round(factor)]
        if min(best) < best[0]:
            verdict = "does not"
        wanted.append((names.get(name, name), *(f"{rate:g}" for rate in best), verdict))
    page = (ROOT / "docs/library.md").read_text()
    head = "| optimizer | width 64 | width 128 | width 256 | the rate of the narrow model |"
    lines = page.partition(head)[2].partition("\n\n")[0].strip().splitlines()[1:]
    shown = [tuple(re.split(r" ?\| ?", line.replace("`", "").strip("| "))) for line in lines]
    assert shown == [row for row in wanted if row[0] != "AdamW with muP rates"]


def test_bytes_beside_adamw_follow_the_formula() -> None:
    """Of AdamW's three elements of four bytes for each parameter; in brackets for the page's model.

    Bytes of an element of a matrix that go to its owner and back: a momentum and an update; both in
    16 bits; a momentum, a weight and a weight; the same with the momentum in 16 bits.
    """
    page = (ROOT / "docs/library.md").read_text()
    rows = page.partition("| bytes beside AdamW |")[2].partition("\n\n")[0].splitlines()[2:]
    for line, sent in zip(rows, (8, 4, 12, 10), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        for cell, ranks in zip(cells, (2, 4, 8, 16), strict=True):
            most, here = (1 + share * sent / (12 * ranks) for share in (1, 0.79))
            assert cell == f"{most:.2f} ({here:.2f})"


def test_tables_name_what_exists() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    for name in re.findall(r"^\| `(\w+)` \| .* \| lr \S+ \|$", page, re.MULTILINE):
        rate = f"{vars(spectral)[name].default_lr:.0e}".replace("e-0", "e-")
        assert f"| `{name}` |" in page and f"lr {rate}" in page
    assert all(f"`{name}`" in page for name in FUSED if not name.startswith(("wq_", "wkv")))
