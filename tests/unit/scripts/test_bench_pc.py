"""The bench of PC layers compares steps of the same model."""

import pytest

from scripts.bench.pc import IN_GRAPH, MATERIALIZED, NONE, measure, report, with_microbatches
from tests.run_configs import tiny_config
from tests.token_files import write_token_set


@pytest.fixture
def found(world, tmp_path):
    """Figures of one step of two micro-batches."""
    write_token_set(tmp_path / "tokens", tokens=2_000, vocab=120, seed=0)
    config = tiny_config(str(tmp_path), "muon", pc__level=2)
    return measure(with_microbatches(config, 2, world), world, repeats=1)


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
