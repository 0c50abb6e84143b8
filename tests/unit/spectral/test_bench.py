"""The benchmark script runs and writes what docs/performance.md reports."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_quick_benchmark(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "scripts/bench/spectral.py", "--quick", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(result.read_text())
    assert figures["machine"]["dtype"] == "bfloat16"
    assert figures["ratios"]["spectral_sphere: slow reference / ours"] > 0
    assert {row["side"] for row in figures["rows"]} == {
        "ours",
        "slow reference",
        "torch.optim.Muon",
    }
