"""The benchmark of PC layers compares steps of the same model."""

import json

import pytest

from scripts.bench.pc import (
    IN_GRAPH,
    MATERIALIZED,
    NONE,
    main,
    measure,
    report,
    with_microbatches,
)
from tests.run_configs import tiny_config


@pytest.fixture
def found(world, tmp_path):
    """The figures of one step with two micro-batches."""
    config = tiny_config(str(tmp_path), "muon", pc__level=2)
    return measure(with_microbatches(config, 2, 1), world, repeats=1)


def test_what_is_kept_beyond_is_weights_pairs_and_gammas(found):
    plain, materialized, in_graph = (found[name]["kept"] for name in (NONE, MATERIALIZED, IN_GRAPH))
    shapes = 2 * [(64, 64), (96, 64), (96, 64), (64, 96)]  # two layers of o, gate, up, down
    pairs = sum(rows + cols for rows, cols in shapes)
    weights = sum(rows * cols for rows, cols in shapes)
    # gamma, its gradient, and AdamW's two moments and count of steps for it
    gammas = 5 * len(shapes)
    assert sum(materialized.values()) - sum(plain.values()) == 4 * (weights + pairs + gammas)
    assert in_graph["pairs in the graph"] == 4 * pairs
    assert materialized["weights"] == plain["weights"]
    assert materialized["gradients"] == plain["gradients"]


def test_the_table_has_a_row_per_variant(found):
    rows = report(2, found).splitlines()
    assert len(rows) == 1 + 3
    assert found[NONE]["ratio"] == found[NONE]["ratio_by_update"] == 1
    assert all(found[name]["step_peak"] > 0 for name in found)


def test_an_update_is_the_part_of_a_step_after_its_passes(found):
    (turn,) = found[MATERIALIZED]["turns"]
    assert 0 < turn["update"] < turn["step"]


def test_the_script_writes_its_figures(tmp_path):
    out = tmp_path / "out.json"
    small = ["train.micro_batch=2", "train.sequence_length=16", "model.layers=1", "model.hidden=32"]
    assert main(["--microbatches", "1", "--repeats", "1", "--json", str(out), *small]) == 0
    content = json.loads(out.read_text())
    assert list(content["steps"]["1"]) == [NONE, MATERIALIZED, IN_GRAPH]
    assert content["command"].startswith("python scripts/bench/pc.py --microbatches 1")
