"""The benchmark script runs and writes what docs/performance.md reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import batched, numerics
from tests.paths import ROOT


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


def test_units_in_a_batch_and_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    batched.main(["--units", "3x8x16", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["msign", *batched.KINDS]


def test_the_numerics_page_on_recorded_momenta() -> None:
    """Recommendations of docs/numerics.md hold on the recorded wide momenta.

    Eight steps in float16 are tangent within the tolerance and near the polar factor; bfloat16 is
    not, and five steps are not.
    """
    stacks = [s for s in numerics.recorded(ROOT / "tests/data/momenta.safetensors") if len(s.m) < 8]
    assert [s.m.shape for s in stacks] == [(4, 128, 256)]
    row = {
        (steps, dtype): numerics.measure(stacks, "polar_express", steps, dtype)
        for steps, dtype in [(8, "float16"), (8, "float32"), (8, "bfloat16"), (5, "float32")]
    }
    assert row[8, "float16"].f[0] < numerics.TOLERANCE < row[8, "bfloat16"].f[0]
    assert row[8, "float32"].polar[1] < 1e-4 < row[8, "float16"].polar[0] < 1e-2
    assert row[8, "bfloat16"].polar[0] > 3e-2 and row[5, "float32"].polar[0] > 3e-2
