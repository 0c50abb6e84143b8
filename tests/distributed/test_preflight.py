"""scripts/preflight.py finds the rank with wrong results and the slow rank."""

import json
import re
import sys
from pathlib import Path

from tests.commands import output_of, torchrun
from tests.launch import run_on_ranks


def test_every_check_of_sound_ranks_is_right(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "checks.json"
    said = output_of(
        *(sys.executable, *torchrun(3), "scripts/preflight.py"),
        *("--mebibytes", "1", "--json", str(target)),
        folder=root,
    )
    assert "all results are right" in said
    rows = json.loads(target.read_text())["checks"]
    names = [re.sub(r",.*", "", row["name"]) for row in rows]
    assert names == [
        "product", "memory", "link", "link", "all-reduce", "reduce-scatter", "all-gather",
        "all-to-all",
    ]  # fmt: skip
    assert all(0 < row["slowest"] <= row["median"] and not row["wrong"] for row in rows)


def test_wrong_and_slow_ranks_are_named() -> None:
    module = "tests.distributed.preflight_workers"
    for wrong, slow in run_on_ranks(3, module, "with_faults", {"wrong": 1, "slow": 2}):
        assert [name.split(" (")[0] for name in wrong] == ["rank 1"]
        assert [name.split(" (")[0] for name in slow] == ["rank 2"]
