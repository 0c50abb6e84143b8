"""scripts/bench/peers.py measures steps that every library takes alike, and its page has them."""

import json
import re

import pytest
import torch

from scripts.bench.peers import Side, main, own
from tests.paths import ROOT


def test_every_side_steps_the_same_matrices_on_the_same_gradients() -> None:
    sides = {name: Side(128, 1, make) for name, make in own().items()}
    for side in sides.values():
        side.new_gradients(3)
    first, *others = sides.values()
    for other in others:
        for mine, its in zip(first.split.matrices, other.split.matrices, strict=True):
            assert torch.equal(mine, its) and torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def test_the_spread_is_that_of_the_update(tmp_path) -> None:
    """torch's Muon is run with its own five steps, of which singular values come out between 0.68
    and 1.13; eight of Polar Express are exact to float32. One step on one layer."""
    file = tmp_path / "peers.json"
    assert main(["--hidden", "128", "--layers", "1", "--steps", "1", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["Muon"]["spread"] == pytest.approx(1, abs=1e-3)
    assert 1.1 < rows["torch Muon"]["spread"] < 1.8
    assert rows["torch AdamW"]["spread"] is None and rows["SpectralSphere"]["spread"] is None
    # A momentum in float32; mean, mean of squares; and singular vectors beside a momentum. AdamW
    # also counts its steps.
    assert rows["Muon"]["state_bytes"] == rows["torch Muon"]["state_bytes"] == 4
    assert rows["torch AdamW"]["state_bytes"] == pytest.approx(8, abs=1e-3)
    assert 4 < rows["SpectralSphere"]["state_bytes"] < 4.5


def test_the_page_has_the_committed_figures() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    found = json.loads((ROOT / "benchmarks/results/library_peers.json").read_text())
    muon = next(row["milliseconds"] for row in found["rows"] if row["name"] == "Muon")
    wanted = [
        (
            f"{row['milliseconds']:.0f} ms",
            f"{row['milliseconds'] / muon:.2f}",
            f"{row['state_bytes']:.2f}",
            "" if row["spread"] is None else f"{row['spread']:.3f}",
        )
        for row in found["rows"]
    ]
    part = page.partition("### One process")[2].partition("\n## ")[0]
    rows = re.findall(
        r"^\| [^|]+ \| ([\d.]+ ms) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|$", part, re.M
    )
    assert rows == wanted
