"""Every supported layout and mode in the support matrix gives the same losses as one process."""

import pytest

from tests.distributed.workers import Case
from tests.launch import run_on_ranks
from tests.support_matrix import FAMILIES, RANKS, ROWS, cells, keys_of
from tests.token_files import write_token_set

# Another order of sums: in float32 as in test_layouts, in bfloat16 with 8 bits of precision.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_refused_gives_the_losses_of_one_process(family, tmp_path):
    """Each layout runs in its own precision with every other family, and in bf16 with the remaining
    families."""
    write_token_set(tmp_path / "tokens", tokens=5_000, vocab=120, seed=0)
    alone: dict[str, Case] = {
        precision: ({}, "muon", keys_of(family, {"train__precision": precision}))
        for precision in TOLERANCE
    }
    refused, number = cells(), FAMILIES.index(family)
    cases: dict[str, Case] = {}
    for i, (row, (layout, keys)) in enumerate(ROWS.items()):
        given = {"train__precision": "bf16"} if (i + number) % 2 else {}
        if not refused[row, family]:
            cases[row] = layout, "muon", keys_of(family, keys | given)
    arguments = {"folder": str(tmp_path), "cases": alone}
    expected = run_on_ranks(1, "tests.distributed.workers", "runs", arguments)[0]
    for result in run_on_ranks(
        RANKS, "tests.distributed.workers", "runs", arguments | {"cases": cases}
    ):
        for row, (_, _, keys) in cases.items():
            precision = keys.get("train__precision", "fp32")
            theirs = expected[precision]["loss"]
            assert result[row]["loss"] == pytest.approx(theirs, rel=TOLERANCE[precision]), row
