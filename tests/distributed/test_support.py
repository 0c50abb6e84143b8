"""Every layout and mode that the support matrix promises runs, with the losses of one process."""

import pytest

from tests.launch import run_on_ranks
from tests.support_matrix import FAMILIES, RANKS, cells
from tests.token_files import write_token_set

WORKERS = "tests.distributed.support_workers"
# Another order of sums: in float32 as in test_layouts, in bfloat16 with 8 bits of precision.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
# A row that says nothing of precision, and one that does: each gives what the others must equal.
ALONE = {"fp32": "data 4", "bf16": "tensor 2, pipeline 2; bf16"}


# Takes minutes: make test-all runs it, make test does not.
@pytest.mark.slow
@pytest.mark.parametrize("everything_in", [None, "bf16"], ids=["its precision", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_refused_gives_the_losses_of_one_process(family, everything_in, tmp_path):
    write_token_set(tmp_path / "tokens", tokens=5_000, vocab=120, seed=0)
    alone = [[row, family] for row in ALONE.values()]
    arguments = {"folder": str(tmp_path), "ranks": 1, "wanted": alone, "precision": everything_in}
    expected = run_on_ranks(1, WORKERS, "losses", arguments)[0]

    wanted = [list(cell) for cell, said in cells().items() if not said and cell[1] == family]
    arguments |= {"ranks": RANKS, "wanted": wanted}
    for result in run_on_ranks(RANKS, WORKERS, "losses", arguments):
        assert len(result) == len(wanted)
        for row, _ in wanted:
            precision = everything_in or ("bf16" if "bf16" in row else "fp32")
            theirs = expected[f"{ALONE[precision]}/{family}"]
            ours = result[f"{row}/{family}"]
            assert ours == pytest.approx(theirs, rel=TOLERANCE[precision]), (row, family)
