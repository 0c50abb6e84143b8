"""Monitors on every layout against figures computed independently, in float64."""

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
    ({}, "muon", {}),
    ({"tensor": 2}, "muon", {}),
    ({"pipeline": 2}, "muon", {}),
    ({"context": 2}, "muon", {}),
    ({"expert": 2}, "muon", MOE),
    ({"tensor": 2}, "muon", MOE),
    ({"expert_tensor": 2}, "muon", MOE),
    ({}, "adamw", {"pc__level": 4}),
    ({"tensor": 2}, "spectral_sphere", {"pc__level": 2}),
    ({"tensor": 2}, "adamw", {"pc__level": 4, "pc__evaluator": "in_graph"}),
]


NOISE = ("gradient_snr", "gradient_signal_share", "gradient_top_share", "noise_samples")
ALONE: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({}, "muon", {}),
    ({}, "muon", MOE),
]
"""The same runs in one process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a token set."""
    found = tmp_path_factory.mktemp("monitors")
    write_token_set(found / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(found)


def on_ranks(ranks: int, folder: str, cases: list) -> list:
    """What the ranks report of the cases."""
    arguments = {"folder": folder, "cases": cases}
    return run_on_ranks(ranks, "tests.distributed.monitor_workers", "seen_and_computed", arguments)


@pytest.fixture(scope="module")
def results(folder):
    return on_ranks(2, folder, CASES)


@pytest.fixture(scope="module")
def alone(folder):
    return on_ranks(1, folder, ALONE)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_monitors_are_the_figures_of_whole_matrices(results, case):
    lines, expected = merged(results, case)
    units = lines[4]["units"]
    assert units.keys() == expected.keys()
    for name, figures in expected.items():
        for figure, value in figures.items():
            # Gram eigenvalues in float64 against singular values: 1e-16 (sigma_1 / sigma_n)^2.
            assert units[name][figure] == pytest.approx(value, rel=1e-6, abs=1e-9), (name, figure)


@pytest.mark.parametrize("case", range(7))
def test_monitors_do_not_depend_on_the_layout(results, alone, case):
    lines, _ = merged(results, case)
    reference, _ = merged(alone, int(CASES[case][2] == MOE))
    for place in ("units", "blocks"):
        assert lines[2][place].keys() == reference[2][place].keys()
        for name, record in reference[2][place].items():
            # If two ranks share experts, the experts' gradients mix the samples of both.
            shared = {"expert", "expert_tensor", "tensor"} & {*CASES[case][0]}
            mixed = "expert" in record.get("role", "") and shared
            record = {k: v for k, v in record.items() if not (mixed and k in NOISE)}
            assert lines[2][place][name].keys() == record.keys(), name
            for figure, value in record.items():
                found = lines[2][place][name][figure]
                # After one float32 step, whose sums have another order.
                if figure not in ("role", "layer"):
                    value = pytest.approx(value, rel=2e-3, abs=1e-6)
                assert found == value, (name, figure)


@pytest.mark.parametrize("case", range(7))
def test_agreement_of_updates_does_not_depend_on_the_layout(results, alone, case):
    lines, _ = merged(results, case)
    reference, _ = merged(alone, int(CASES[case][2] == MOE))
    for name, record in reference[4]["units"].items():
        assert ("update_snr" in record) and "update_snr" not in lines[2]["units"][name]
        assert record["update_top_share"] > 1 / 3  # of four samples, which span three dimensions
        for figure in ("update_snr", "update_signal_share", "update_top_share"):
            # After four float32 steps, which amplify the rounding of the first.
            close = pytest.approx(record[figure], rel=2e-2, abs=1e-4)
            assert lines[4]["units"][name][figure] == close, (name, figure)
