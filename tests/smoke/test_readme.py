"""The README's commands, run as they stand except for their length."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
TRAINING = [command for command in COMMANDS if "pretrain.py" in command]
SHORT = ["train.exit_step=3", "log.interval=1", "validation.samples=32"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The checkout by links, with the corpus where the recipes expect it, as `make data` does."""
    folder: Path = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("data", "runs"):
            (folder / path.name).symlink_to(path)
    command = [sys.executable, "scripts/prepare_data.py", "--demo", "--output", "data/demo"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_every_command_is_a_make_target_or_run_here():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in filter(None, COMMANDS):
        assert command in TRAINING or command.split()[1] in targets, command


@pytest.mark.parametrize("command", TRAINING)
def test_training_command(command, checkout: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    words = command.split()
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    else:
        words[0] = sys.executable
    if "--dry-run" not in words:
        words += [*SHORT, f"run.dir={run_dir}"]
    done = subprocess.run(
        words, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    if "--dry-run" in words:
        assert "== memory per rank" in done.stdout
    else:
        assert "done: step 3 of" in done.stdout
        assert (run_dir / "metrics.jsonl").exists() and (run_dir / "routing.jsonl").exists()
