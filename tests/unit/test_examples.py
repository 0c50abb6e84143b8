"""The examples train: each is started as its first lines say, and its loss falls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def losses(root: Path, folder: Path, *command: str) -> list[float]:
    """The losses that an example prints, with the library under the name of the wheel."""
    (folder / "spectrain").symlink_to(root / "spectral")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Process groups that another test made in this process have left their names there.
    own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=root / "examples",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)", done.stdout, re.MULTILINE)]


def check(found: list[float]) -> None:
    # ln 256 = 5.55 at the start; bytes of English by their frequencies alone have 3.1.
    assert found[0] > 5 and found[-1] < 3.9, found


@pytest.mark.parametrize("name", ["plain_loop", "hf_trainer"])
def test_an_example_trains(root: Path, tmp_path: Path, name: str) -> None:
    if name == "hf_trainer":
        pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    check(losses(root, tmp_path, f"{name}.py", "--steps", "60"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["torchtitan_fsdp2", "accelerate_fsdp2"])
def test_an_example_trains_on_two_ranks(root: Path, tmp_path: Path, name: str) -> None:
    if name == "accelerate_fsdp2":
        pytest.importorskip("accelerate")
    check(losses(root, tmp_path, *LAUNCH, f"{name}.py", "--steps", "20"))


def test_examples_are_short_and_say_how_they_start(root: Path) -> None:
    examples = [p for p in (root / "examples").glob("*.py") if p.name != "corpus.py"]
    assert len(examples) == 4
    page = (root / "docs" / "library.md").read_text()
    for path in examples:
        text = path.read_text()
        assert len(text.splitlines()) < 80
        assert f"examples/{path.name} --steps" in text
        assert f"examples/{path.name}" in page
