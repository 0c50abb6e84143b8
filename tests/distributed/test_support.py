"""Every layout and mode in the support matrix runs, with the losses of one process."""

import pytest

from tests.distributed.workers import Case
from tests.launch import run_on_ranks
from tests.support_matrix import FAMILIES, RANKS, ROWS, cells, keys_of
from tests.token_files import write_token_set

# Another order of sums: in float32 as in test_layouts, in bfloat16 with 8 bits of precision.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


# This test takes minutes, and an hour on a busy machine, so only make test-all runs it.
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("everything_in", [None, "bf16"], ids=["its precision", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_refused_gives_the_losses_of_one_process(family, everything_in, tmp_path):
    write_token_set(tmp_path / "tokens", tokens=5_000, vocab=120, seed=0)
    given = {} if everything_in is None else {"train__precision": everything_in}
    alone: dict[str, Case] = {
        precision: ({}, "muon", keys_of(family, {"train__precision": precision}))
        for precision in TOLERANCE
    }
    cases: dict[str, Case] = {
        row: (ROWS[row][0], "muon", keys_of(family, ROWS[row][1] | given))
        for (row, other), said in cells().items()
        if not said and other == family
    }
    arguments = {"folder": str(tmp_path), "cases": alone}
    expected = run_on_ranks(1, "tests.distributed.workers", "runs", arguments)[0]
    for result in run_on_ranks(
        RANKS, "tests.distributed.workers", "runs", arguments | {"cases": cases}
    ):
        for row, (_, _, keys) in cases.items():
            precision = keys.get("train__precision", "fp32")
            theirs = expected[precision]["loss"]
            assert result[row]["loss"] == pytest.approx(theirs, rel=TOLERANCE[precision]), row
