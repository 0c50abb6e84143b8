"""The oldest and the newest release of megatron-core train and save alike."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.engine import TESTED, engine_version
from tests.engine_runs import CASES
from tests.launch import environment
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.token_files import write_token_set

NEWEST = TESTED[1]
# float32, and the same operations in the same order but for fused parts of newer releases.
LOSS_TOLERANCE = 1e-6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def newest() -> Path:
    """The folder of the newest tested engine."""
    folder = ROOT / ".engines" / NEWEST
    if not folder.is_dir():
        pytest.skip(f"`make .engines/{NEWEST}` lays the other engine there")
    return folder


def run(engine: Path | None, config: Path, folder: Path, *saved: Path) -> dict[str, Any]:
    """What `tests.engine_runs` writes with an engine, the installed one for None."""
    folder.mkdir(exist_ok=True)
    path = [str(engine)] if engine else []
    command = [
        sys.executable,
        "-m",
        "tests.engine_runs",
        str(config),
        str(folder),
        *map(str, saved),
    ]
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([*path, variables["PYTHONPATH"]])
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "losses.json").read_text())


def test_losses_are_equal_and_checkpoints_cross(tmp_path: Path, newest: Path) -> None:
    """Ten steps and a save by each engine, then three steps by each from the saves of both."""
    engines = {"installed": None, "newest": newest}
    config = tmp_path / "config"
    config.mkdir()
    write_token_set(config / "tokens", tokens=4000, vocab=120, seed=3)
    tiny_config(str(config), "muon")
    first = {name: run(engine, config, tmp_path / name) for name, engine in engines.items()}
    assert {name: found["version"] for name, found in first.items()} == {
        "installed": engine_version(),
        "newest": NEWEST,
    }
    compare(first["installed"]["losses"], first["newest"]["losses"], steps=10)
    own, other = tmp_path / "installed", tmp_path / "newest"
    by_installed = run(None, config, own, own, other)
    by_newest = run(newest, config, other, own)
    compare(by_installed["installed"], by_installed["newest"], steps=3)
    compare(by_installed["installed"], by_newest["installed"], steps=3)


def compare(expected: dict[str, list[float]], found: dict[str, list[float]], *, steps: int) -> None:
    """Assert that the losses of all cases are equal, and print how far apart they are (-rP)."""
    assert sum(len(families) for _, families in CASES) == len(expected) == len(found)
    assert len({tuple(losses) for losses in expected.values()}) > 3  # families differ
    for case, losses in expected.items():
        assert len(losses) == len(found[case]) == steps
        worst = max(abs(a / b - 1) for a, b in zip(found[case], losses, strict=True))
        print(f"{case}: {steps} losses, relative difference at most {worst:.1e}")
        assert worst <= LOSS_TOLERANCE, case
