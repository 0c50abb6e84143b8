"""Monitors on every layout against figures computed apart, in float64."""

from typing import Any

import pytest

from tests.distributed.monitor_workers import merged
from tests.launch import run_on_ranks
from tests.token_files import write_token_set

MOE = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
}
CASES: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({}, "spectral_sphere", {}),
    ({"tensor": 2}, "muon", {}),
    ({"pipeline": 2}, "muon_plus_plus", {}),
    ({"expert": 2}, "muon_sphere", MOE),
    ({}, "adamw", {"pc__level": 4}),
    ({"tensor": 2}, "muon", {"pc__level": 2}),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitors")
    write_token_set(folder / "tokens", tokens=8_000, vocab=120, seed=0)
    arguments = {"folder": str(folder), "cases": CASES}
    return run_on_ranks(2, "tests.distributed.monitor_workers", "seen_and_computed", arguments)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_monitors_are_the_figures_of_whole_matrices(results, case):
    seen, expected = merged(results, case)
    units = seen["line"]["units"]
    assert units.keys() == expected.keys()
    for name, figures in expected.items():
        for figure, value in figures.items():
            # Gram eigenvalues in float64 against singular values: 1e-16 (sigma_1 / sigma_n)^2.
            assert units[name][figure] == pytest.approx(value, rel=1e-6, abs=1e-9), (name, figure)
