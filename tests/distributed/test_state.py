"""Checkpoints are saved on one layout, loaded on any other layout, and resumed bit for bit."""

from typing import Any

import pytest
import torch

from parallel.checkpoint.state import boxes
from spectral.division import narrowed
from tests.launch import run_on_ranks

WORKERS = "tests.distributed.state_workers"
SPHERE = "spectral_sphere float32"
RUNS = ["muon_plus_plus float32", "spectral_sphere bfloat16", SPHERE]
MIXTURE = "spectral_sphere float32 moe"
TIED = "muon float32 tied"
ADAMW = "adamw float32"  # counters of heads, which are whole on one tensor rank

# Layouts by the workers' names.
ONE, FOUR = "ranks1", "ranks4 tensor2"
DATA, TENSOR, PIPELINE, EXPERT, CUT = (
    "ranks2",
    "ranks2 tensor2",
    "ranks2 pipeline2",
    "ranks2 expert2",
    "ranks2 expert_tensor2",
)

# float32: after loading on another layout, sums over ranks have another order. The loss of the
# second step has passed one update; msign amplifies rounding in directions that hardly occur.
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3

Results = dict[str, dict[str, Any]]

# The time of all launches counts for the first test.
pytestmark = pytest.mark.timeout(1800)


def pairs(sources: list[str], runs: list[str]) -> list[tuple[str, str]]:
    """Return all pairs of a source and a run."""
    return [(source, run) for source in sources for run in runs]


# By number of ranks, in order: layout, runs to save on it, (saving layout, run) to load on it.
STOPS: list[tuple[int, list[tuple[dict[str, int], list[str], list[tuple[str, str]]]]]] = [
    (1, [({}, [*RUNS, MIXTURE, TIED], [])]),
    (
        2,
        [
            ({}, [SPHERE], []),
            ({"tensor": 2}, [*RUNS, MIXTURE, ADAMW], [*pairs([ONE], RUNS), (DATA, SPHERE)]),
            ({"pipeline": 2}, [SPHERE, TIED], [(TENSOR, SPHERE), (ONE, TIED)]),
            ({"expert": 2}, [MIXTURE], pairs([ONE, TENSOR], [MIXTURE])),
            ({"expert_tensor": 2}, [MIXTURE], [(EXPERT, MIXTURE)]),
        ],
    ),
    (4, [({"tensor": 2}, [SPHERE], [(PIPELINE, SPHERE), (PIPELINE, TIED)])]),
    (1, [({}, [], [*pairs([TENSOR], [*RUNS, ADAMW]), (FOUR, SPHERE), (CUT, MIXTURE)])]),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Results]:
    """Results of all runs: "saved" by layout and run, "loaded" by saving layout, run and loading
    layout, and the error messages of "refused" loads.
    """
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    found: dict[str, Results] = {"saved": {}, "loaded": {}, "refused": {}}
    for ranks, stops in STOPS:
        arguments = {"folder": folder, "stops": stops, "refuse": ranks == 2}
        several = run_on_ranks(ranks, WORKERS, "checkpoints", arguments)
        for kind in several[0]:
            found[kind] |= together([each[kind] for each in several])
    return found


@pytest.fixture(scope="module")
def saved(results) -> Results:
    """The runs that saved checkpoints."""
    return results["saved"]


@pytest.fixture(scope="module")
def loaded(results) -> Results:
    """The runs that loaded a checkpoint saved on another layout."""
    return results["loaded"]


def together(ranks: list[Results]) -> Results:
    """Merge the results of all ranks: collect all tensors, and keep a single copy of values that
    must be equal."""
    found: Results = {}
    for name, first in ranks[0].items():
        found[name] = dict(first)
        for rank in ranks[1:]:
            for key, value in rank[name].items():
                if key in ("saved", "loaded", "after"):
                    found[name][key] = found[name][key] | value
                elif key == "different":
                    found[name][key] = found[name][key] + value
                else:
                    assert value == first[key], (name, key)
    return found


def test_a_run_that_loads_goes_on_as_if_it_had_not_stopped(saved):
    assert len(saved) == sum(len(saves) for _, stops in STOPS for _, saves, _ in stops)
    for name, result in saved.items():
        assert result["different"] == [], name
        assert result["losses"] == result["losses again"], name
        assert result["extra"] == {"step": 2}


def test_every_kind_of_state_is_compared(saved):
    names = set(saved[f"{ONE} muon_plus_plus float32"]["saved"])
    for name in ("weight", "momentum", "u", "v", "second_u", "second_v", "correlation"):
        assert f"layers.1.q.3 {name}" in names
    assert any(
        name.endswith(" nearby") for name in saved[f"{ONE} spectral_sphere float32"]["saved"]
    )
    assert {f"embedding {name}" for name in ("weight", "momentum", "variance", "step")} <= names
    bias = saved[f"{EXPERT} {MIXTURE}"]["saved"]["router 2 bias"]
    assert bias.abs().sum() > 0
    counts = saved[f"{ONE} {SPHERE}"]["saved"]
    assert all((value == 2).all() for name, value in counts.items() if name.endswith(" step"))


def test_any_layout_loads_what_any_other_saved_bit_for_bit(saved, loaded):
    for name, run in loaded.items():
        ours, theirs = run["loaded"], saved[name.split(" -> ")[0]]["saved"]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=f"{name}: {{}}".format)


def test_training_goes_on_from_another_layout(saved, loaded):
    for name, ours in loaded.items():
        if "bfloat16" in name:
            continue
        theirs = saved[name.split(" -> ")[0]]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=LOSS_TOLERANCE), name
        for key, value in ours["after"].items():
            if key.endswith(" weight"):
                error = (value - theirs["after"][key]).norm() / theirs["after"][key].norm()
                assert error < WEIGHT_TOLERANCE, (name, key)


def test_parameters_are_the_loaded_masters_rounded(loaded):
    for name, result in loaded.items():
        assert result["rounded"], name
        assert all(value.dtype == torch.float32 for value in result["loaded"].values())


def test_what_does_not_fit_is_refused_by_name_on_every_rank(results):
    said = {case: answer["said"] for case, answer in results["refused"].items()}
    assert "weight/layers.2.q.0 is missing" in said["missing unit"]
    assert (
        "weight/layers.0.gate has shape (48, 32), but (64, 32) in the model" in said["other shape"]
    )
    assert "optimizer/layers.0.q.0/u is missing" in said["other rule"]
    assert "has dtype torch.float32, but torch.float64 in the model" in said["other dtype"]
    assert "the model has no weight/layers.2.q.0" in said["unit too many"]


@pytest.mark.parametrize("axes", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_are_the_range_in_order(axes):
    array = torch.arange(torch.Size(axes).numel()).view(axes)
    for start in range(array.numel()):
        for stop in range(start + 1, array.numel() + 1):
            found = boxes(start, stop, axes)
            parts = [narrowed(array, box) for box in found]
            assert len(found) <= 2 * len(axes) - 1
            assert torch.equal(torch.cat([p.flatten() for p in parts]), torch.arange(start, stop))
