"""The same run on any layout: one process against data, tensor and pipeline parallelism."""

import pytest

from tests.launch import run_on_ranks
from tests.run_configs import RULES
from tests.token_files import write_token_set

WORKERS = "tests.distributed.workers"

# float32: sums over ranks come in another order, and msign passes their rounding (about 1e-7) on
# amplified in directions that hardly occur in the momentum. Twenty steps stay well under this.
TOLERANCE = 1e-4

LAYOUTS = {
    "data 2": (2, {}),
    "tensor 2 with sequence parallel": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the shared token set."""
    path = tmp_path_factory.mktemp("layouts")
    write_token_set(path / "tokens", tokens=20_000, vocab=120, seed=0)
    return str(path)


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process."""
    return run_on_ranks(1, WORKERS, "curves", {"folder": folder, "layout": {}, "overrides": {}})[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_one_process_curve(name, alone, folder):
    ranks, layout = LAYOUTS[name]
    arguments = {"folder": folder, "layout": layout, "overrides": {}}
    for result in run_on_ranks(ranks, WORKERS, "curves", arguments):
        for rule in RULES:
            ours, reference = result[rule], alone[rule]
            assert len(ours["loss"]) == 20
            assert ours["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE), rule
            assert ours["validation"] == pytest.approx(reference["validation"], rel=TOLERANCE)
            assert ours["norm"] == pytest.approx(reference["norm"], rel=1e-2), rule


def test_loss_falls_under_every_rule(alone):
    for rule in RULES:
        assert alone[rule]["loss"][-1] < alone[rule]["loss"][0] - 0.5, rule


def test_interleaved_pipeline_gives_the_one_process_curve(alone, folder, tmp_path):
    write_token_set(tmp_path / "tokens", tokens=20_000, vocab=120, seed=0)
    four = {"model__layers": 4, "train__exit_step": 5}
    arguments = {"folder": str(tmp_path), "layout": {}, "overrides": four}
    reference = run_on_ranks(1, WORKERS, "curves", arguments)[0]
    arguments["layout"] = {"pipeline": 2, "virtual_pipeline": 2}
    for result in run_on_ranks(2, WORKERS, "curves", arguments):
        for rule in RULES:
            assert result[rule]["loss"] == pytest.approx(reference[rule]["loss"], rel=TOLERANCE)
