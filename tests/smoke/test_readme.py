"""The commands of pages, in their order, in a fresh copy of the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import copy_repository
from tests.launch import ROOT, environment

SHORT = "train.exit_step=2 log.interval=1 validation.samples=2 validation.samples_tokens=2"
BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FAST = ("make", "source", "pretrain.py", "plot.py", "prepare_data.py")
"""Names that README's commands must contain to run in the fast test."""
OTHER = ("--dry-run", "--fit", "--rehearse")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of the repository and an environment, as after `make setup`."""
    target = tmp_path / "spectrain"
    copy_repository(target, "-co", "--exclude-standard")
    venv = target / ".venv"
    venv.mkdir()
    for entry in ("bin", "lib", "pyvenv.cfg"):
        if (Path(sys.prefix) / entry).exists():
            (venv / entry).symlink_to(Path(sys.prefix) / entry)
    (venv / ".installed").touch()
    return target


def blocks(page: str) -> list[tuple[str, str]]:
    """Return kind and text of the bash and YAML blocks of a page, in order."""
    return BLOCK.findall((ROOT / page).read_text())


def run(copy: Path, page: str, change: "list[tuple[str, str]] | None" = None) -> str:
    """Run the given blocks, or all blocks of a page, in the copy; a YAML block becomes
    mine.yaml."""
    script = ["set -eo pipefail"]
    for kind, text in blocks(page) if change is None else change:
        script.append(text if kind == "bash" else f"cat > mine.yaml <<'END'\n{text}END")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=copy,
        env=environment() | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=5000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout


def shortened(text: str) -> str:
    """Return the commands of a block for the fast test, with two training steps on one rank;
    without `make test`, which runs this test."""
    lines = []
    for line in text.splitlines():
        command = line.split("  #")[0].strip()
        if command == "make test":
            continue
        if command == "make train":
            command = f'make train NPROC=1 ARGS="{SHORT}"'
        if not any(word in command for word in FAST) or any(word in command for word in OTHER):
            continue
        if "pretrain.py" in command:
            command = f"{command.replace('--ranks 2', '')} {SHORT}"
        lines.append(command)
    return "".join(f"{line}\n" for line in lines)


def test_the_way_in_works_from_a_fresh_copy(copy: Path) -> None:
    """Run README's commands up to a run on a user's text, with the config that prepare_data.py
    prints."""
    way_in = [
        (kind, shortened(text) if kind == "bash" else text) for kind, text in blocks("README.md")
    ]
    said = run(copy, "README.md", way_in)
    (mine,) = [text for kind, text in blocks("README.md") if kind == "yaml"]
    assert mine in said and "and run: python pretrain.py --config mine.yaml --ranks 2\n" in said
    assert said.count("done: step 2 of") == 3 and "data pages: 100.0% of the samples" in said
    assert (copy / "runs/tiny_sso/report.html").exists() and (copy / "runs/mine").is_dir()


def test_the_first_commands_are_those_of_ci() -> None:
    """The first command sets up and runs the main job, the second sets up and runs the tests."""
    first = blocks("README.md")[0][1]
    assert [line.split("  #")[0].strip() for line in first.splitlines()] == [
        "make train",
        "make test",
    ]
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "page", ["README.md", "docs/running.md", "docs/data.md", "docs/huggingface.md"]
)
def test_every_command_of_a_page_works_after_those_before_it(page: str, copy: Path) -> None:
    assert "next: python scripts/plot.py" in run(copy, page)
