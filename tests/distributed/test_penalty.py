"""The Gram penalty, its switches and the choice of rules are those of one process."""

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
    "gram_penalty__horizon": 1,
    "gram_penalty__schedule": "adaptive",
    "gram_penalty__adaptive__interval": 1,
    "gram_penalty__adaptive__smoothing": 0.0,
}
TOP_SHARE = {
    **PENALTY,
    "gram_penalty__adaptive__measure": "top_share",
    "gram_penalty__adaptive__samples": 4,
    "gram_penalty__adaptive__start": 1,
    "gram_penalty__adaptive__on_above": 1.2,
    "gram_penalty__adaptive__off_below": 1.1,
}
GRAM = {
    **PENALTY,
    "gram_penalty__adaptive__on_above": 0.0005,
    "gram_penalty__adaptive__off_below": 0,
}
FIXED = {**COMMON, "gram_penalty__coefficient": 0.3, "gram_penalty__horizon": 1}
EXPERTS = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
    "gram_penalty__roles": "[v,o,down,expert_up,expert_down]",
}
ALONE: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({}, "adamw", TOP_SHARE),
    ({}, "adamw", GRAM),
    ({}, "adamw", {**TOP_SHARE, **EXPERTS}),
    ({}, "muon", {**FIXED, **EXPERTS}),
]
"""Runs of one process."""

SHARED = [
    *((layout, 0) for layout in ({}, {"tensor": 2}, {"pipeline": 2})),
    ({"tensor": 2}, 1),
    *((layout, 2) for layout in ({"expert": 2}, {"tensor": 2})),
    ({"expert": 2}, 3),
    ({"expert_tensor": 2}, 3),
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
            if SHARED[case][1] < 3:  # no penalty acts before its first measurement
                wanted = torch.zeros_like(wanted)
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
                if key in ("penalty/on", "penalty/switched"):
                    assert line[key] == value, key
                else:
                    # Another order of sums in float32; growth is a small difference of logarithms.
                    assert line[key] == pytest.approx(value, rel=2e-3, abs=1e-6), key


@pytest.mark.parametrize("run", range(3))
def test_the_switched_runs_are_switched(alone, run):
    assert {line["penalty/on"] for line in alone[run]["lines"]} == {0.0, 1.0}
