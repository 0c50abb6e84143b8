"""A tenth of the bench of msign in 16 bits: no output is unbounded, whatever the input."""

import json

import pytest

from scripts.bench import msign_stability
from scripts.bench.msign_stability import MEDIUM, SMALL, gradients, joined, main, recorded, searches


def test_recorded_momenta_that_once_diverged() -> None:
    assert [found for found in recorded() if not found.holds] == []


@pytest.mark.parametrize(("shapes", "count"), [(SMALL, 1000), (MEDIUM, 6)])
def test_matrices_like_gradients(shapes: list[tuple[int, int]], count: int) -> None:
    found = joined(gradients(shapes, count, seed=1))
    assert sum(each.count for each in found) == 2 * count
    assert {each.shape for each in found} == set(shapes)
    assert [each for each in found if not each.holds] == []


def test_adversarial_search() -> None:
    found = list(searches(3_000, seed=1))
    assert [each for each in found if not each.holds] == []


def test_what_has_no_margin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds what diverges: the published polynomials of `cans` as they are."""
    from dataclasses import replace

    from spectral.schedules import SCHEDULES

    monkeypatch.setitem(SCHEDULES, "cans", replace(SCHEDULES["cans"], half_margin=1.0))
    found = [
        msign_stability.search((2, 4), "cans", "bfloat16", steps=300, seed=seed)
        for seed in range(3)
    ]
    assert not all(each.holds for each in found)


def test_the_bench_writes_what_it_found(tmp_path, capsys) -> None:
    out = tmp_path / "found.json"
    counts = ["--count", "20", "--medium", "1", "--large", "0", "--search", "42"]
    assert main(["--output", str(out), *counts]) == 0
    content = json.loads(out.read_text())
    assert all(content[part]["holds"] for part in ("momenta", "small", "search", "medium"))
    assert content["small"]["matrices"] == 19
    assert "search" in capsys.readouterr().out
