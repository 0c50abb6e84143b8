"""Checkpoints: saved on one layout, loaded on any other, and resumed as if nothing had happened."""

from typing import Any

import pytest
import torch

from parallel.state import boxes
from tests.launch import run_on_ranks

WORKERS = "tests.distributed.state_workers"
RULES = ("adamw", "muon", "muon_sphere", "spectral_sphere", "muon_plus_plus")
RUNS = [f"{rule} float32" for rule in RULES] + ["adamw bfloat16", "spectral_sphere bfloat16"]

# Layouts by the name that the workers give them.
ONE = "ranks1"
TWO: dict[str, dict[str, int]] = {
    "ranks2": {},
    "ranks2 tensor2": {"tensor": 2},
    "ranks2 pipeline2": {"pipeline": 2},
}
FOUR: dict[str, dict[str, int]] = {"ranks4 tensor2": {"tensor": 2}}

# float32: after the loading, sums over ranks come in another order. The loss of the second step has
# passed one update; msign passes rounding on amplified in directions that hardly occur.
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Where the checkpoints are."""
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def saved(folder) -> Results:
    """The runs that save, on every layout."""
    found: Results = {}
    for ranks, layouts in ((1, [{}]), (2, list(TWO.values())), (4, list(FOUR.values()))):
        arguments = {"folder": folder, "layouts": layouts, "runs": RUNS}
        found |= together(run_on_ranks(ranks, WORKERS, "save_and_continue", arguments))
    return found


@pytest.fixture(scope="module")
def loaded(folder, saved) -> Results:
    """The runs that load what another layout saved."""
    found: Results = {}
    for ranks, sources, layouts in (
        (1, [*TWO, *FOUR], [{}]),
        (2, [ONE, "ranks2 tensor2", *FOUR], list(TWO.values())),
        (4, [ONE, "ranks2 pipeline2"], list(FOUR.values())),
    ):
        arguments = {"folder": folder, "sources": sources, "layouts": layouts, "runs": RUNS}
        found |= together(run_on_ranks(ranks, WORKERS, "load_and_continue", arguments))
    return found


def together(ranks: list[Results]) -> Results:
    """The results of all ranks as one: tensors of all, what every rank must agree on once."""
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


def sources(loaded: Results) -> list[tuple[str, str]]:
    """Every loaded run with the name of the saved run that it loads."""
    return [(name, f"{name.split(' -> ')[0]} {' '.join(name.split()[-2:])}") for name in loaded]


def test_a_run_that_loads_goes_on_as_if_it_had_not_stopped(saved):
    assert len(saved) == 5 * len(RUNS)
    for name, result in saved.items():
        assert result["different"] == [], name
        assert result["losses"] == result["losses again"], name
        assert result["extra"] == {"step": 2}


def test_every_kind_of_state_is_compared(saved):
    names = set(saved[f"{ONE} muon_plus_plus float32"]["saved"])
    for name in ("weight", "momentum", "u", "v", "second_u", "second_v", "correlation"):
        assert f"layers.1.q.3 {name}" in names
    assert {"multiplier", "slope"} <= {
        name.split()[-1] for name in saved[f"{ONE} spectral_sphere float32"]["saved"]
    }
    assert {f"embedding {name}" for name in ("weight", "momentum", "variance", "step")} <= names
    counts = saved[f"{ONE} adamw float32"]["saved"]
    assert all((value == 2).all() for name, value in counts.items() if name.endswith(" step"))


def test_any_layout_loads_what_any_other_saved_bit_for_bit(saved, loaded):
    for name, source in sources(loaded):
        ours, theirs = loaded[name]["loaded"], saved[source]["saved"]
        assert ours.keys() == theirs.keys(), name
        for key, value in ours.items():
            assert value.dtype == theirs[key].dtype, (name, key)
            assert torch.equal(value, theirs[key]), (name, key)


def test_training_goes_on_from_another_layout(saved, loaded):
    for name, source in sources(loaded):
        if "bfloat16" in name:
            continue
        ours, theirs = loaded[name], saved[source]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=LOSS_TOLERANCE), name
        for key, value in ours["after"].items():
            if key.endswith(" weight"):
                error = (value - theirs["after"][key]).norm() / theirs["after"][key].norm()
                assert error < WEIGHT_TOLERANCE, (name, key)


def test_bfloat16_parameters_come_from_the_loaded_float32_masters(loaded):
    for name, result in loaded.items():
        if "bfloat16" in name:
            assert all(value.dtype == torch.float32 for value in result["loaded"].values())


def test_what_does_not_fit_is_refused_by_name_on_every_rank(folder):
    for said in run_on_ranks(2, WORKERS, "refusals", {"folder": folder}):
        assert "weight/layers.2.q.0 is missing" in said["missing unit"]
        assert (
            "weight/layers.0.gate has shape (48, 32), the model's has (64, 32)"
            in said["other shape"]
        )
        assert "optimizer/layers.1.q.0/u is missing" in said["other rule"]
        assert "has dtype torch.float32, the model's has torch.float64" in said["other dtype"]
        assert "the model has no weight/layers.2.q.0" in said["unit too many"]
        assert "is not empty" in said["folder in use"]


@pytest.mark.parametrize("axes", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_are_the_range_in_order(axes):
    array = torch.arange(torch.Size(axes).numel()).view(axes)
    for start in range(array.numel()):
        for stop in range(start + 1, array.numel() + 1):
            found = boxes(start, stop, axes)
            parts = [
                array[tuple(slice(o, o + n) for o, n in zip(b.offset, b.sizes, strict=True))]
                for b in found
            ]
            assert len(found) <= 2 * len(axes) - 1
            assert all(part.shape == box.sizes for part, box in zip(parts, found, strict=True))
            assert torch.equal(torch.cat([p.flatten() for p in parts]), torch.arange(start, stop))
