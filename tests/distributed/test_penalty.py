"""The Gram penalty is that of one process."""

from typing import Any

import pytest
import torch

from tests.launch import run_on_ranks
from tests.token_files import write_token_set

WORKERS = "tests.distributed.penalty_workers"
STEPS = 6
COMMON = {
    "train__steps": STEPS,
    "log__interval": 1,
    "monitors__interval": 0,
    "validation__interval": 0,
    "validation__samples": 1,
}
PENALTY = {
    **COMMON,
    "gram_penalty__coefficient": 0.3,
    "gram_penalty__horizon": 0.5,
}
EXPERTS = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
    "gram_penalty__roles": "[v,o,down,expert_up,expert_down]",
}
ALONE: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({}, "adamw", PENALTY),
    ({}, "muon", {**PENALTY, **EXPERTS}),
]
"""Runs of one process."""

SHARED = [
    *((layout, 0) for layout in ({}, {"tensor": 2}, {"pipeline": 2})),
    *((layout, 1) for layout in ({"expert": 2}, {"tensor": 2}, {"expert_tensor": 2})),
]
"""Layouts of two ranks, and which of the runs of one process they share."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a token set."""
    found = tmp_path_factory.mktemp("penalty")
    write_token_set(found / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(found)


@pytest.fixture(scope="module")
def alone(folder):
    arguments = {"folder": folder, "cases": ALONE, "steps": STEPS}
    return run_on_ranks(1, WORKERS, "penalised", arguments)[0]


@pytest.fixture(scope="module")
def shared(folder):
    cases = [(layout, *ALONE[run][1:]) for layout, run in SHARED]
    arguments = {"folder": folder, "cases": cases, "steps": STEPS}
    return run_on_ranks(2, WORKERS, "penalised", arguments)


@pytest.mark.parametrize("case", range(len(SHARED)), ids=lambda i: str(SHARED[i]))
def test_its_gradient_is_added_once_whoever_has_the_unit(shared, alone, case):
    names = set()
    for rank in shared:
        for name, wanted in rank[case]["wanted"].items():
            added = rank[case]["added"][name].double()
            # The difference of two float32 sums, as exact as the larger one.
            torch.testing.assert_close(added, wanted, rtol=1e-4, atol=1e-6)
            names.add(name)
    assert names == alone[SHARED[case][1]]["wanted"].keys()


@pytest.mark.parametrize("case", range(len(SHARED)), ids=lambda i: str(SHARED[i]))
def test_what_is_logged_and_decided_is_that_of_one_process(shared, alone, case):
    reference = alone[SHARED[case][1]]
    for rank in shared:
        assert rank[case]["losses"] == pytest.approx(reference["losses"], rel=1e-4)
        for line, wanted in zip(rank[case]["lines"], reference["lines"], strict=True):
            assert line.keys() == wanted.keys()
            for key, value in wanted.items():
                # Another order of sums in float32.
                assert line[key] == pytest.approx(value, rel=2e-3, abs=1e-6), key


@pytest.mark.parametrize("run", range(len(ALONE)))
def test_it_stops_after_its_horizon(alone, run):
    assert [line["penalty/on"] for line in alone[run]["lines"]] == [1, 1, 1, 0, 0, 0]
