"""Commands that are killed at random moments: no partial output is accepted, and the same command
works afterwards and gives the undisturbed result.

    pytest tests/unit/scripts/test_kills.py -m slow

kills each command KILLS times.
"""

import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import pretrain
from scripts import convert_hf, prepare_data
from scripts.verify import data_problems
from tests.launch import FORKS, start_forks
from tests.run_configs import tiny_config
from tests.run_results import hashes, same_state
from tests.token_files import write_token_set
from training.checkpoint.checkpoints import BrokenCheckpointError, problems, read_checkpoint
from training.checkpoint.stored_checkpoint import ResumeError

KILLS = 15


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Choose the modules that forks import, unless another file of this process has started the
    server."""
    FORKS.set_forkserver_preload(["transformers", "tokenizers", "tests.frozen"])


@dataclass(frozen=True)
class Command:
    """A command, and checks of its output: whether it is accepted, and equals another."""

    main: Callable[[Sequence[str]], int]
    arguments: Callable[[Path], Sequence[str]]
    accepted: Callable[[Path], bool]
    equal: Callable[[Path, Path], bool]


def run(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    """Run a command in a separate process without output."""
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115
    sys.exit(main(arguments))


def start(command: Command, folder: Path) -> BaseProcess:
    """Start a command that writes to FOLDER/out."""
    folder.mkdir(exist_ok=True)
    process = FORKS.Process(target=run, args=(command.main, list(command.arguments(folder))))
    process.start()
    return process


def whole(command: Command, folder: Path) -> int | None:
    """Return the exit code of an undisturbed command."""
    process = start(command, folder)
    process.join(600)
    return process.exitcode


def same_files(one: Path, other: Path) -> bool:
    """Return whether two folders contain the same files."""
    return hashes(one) == hashes(other)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a complete checkpoint, and check that it is sound."""
    try:
        found = read_checkpoint(folder)
    except (BrokenCheckpointError, ResumeError):
        return False
    assert list(problems(found)) == []
    return True


def same_import(one: Path, other: Path) -> bool:
    """Return whether two checkpoints of weights contain the same tensors."""
    return not same_state(*(read_checkpoint(each).tensors() for each in (one, other)))


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, Command]:
    """Return the commands by name, with inputs that take long enough."""
    given = tmp_path_factory.mktemp("given")
    lines = (f"Line {i}: the cat sat on the mat {i * i} times.\n" for i in range(3000))
    (given / "text.txt").write_text("".join(lines))
    write_token_set(given / "tokens", tokens=8_000, vocab=120, seed=0)
    tiny_config(str(given), "muon")
    config = str(given / "config.yaml")
    more = ["train.exit_step=1", "checkpoint.interval=1", "validation.samples=2"]
    export = ["export", str(given / "run"), str(given / "hf"), "--no-tokenizer", "--no-verify"]
    start_forks()
    assert pretrain.main(["--config", config, *more, f"run.dir={given / 'run'}"]) == 0
    assert convert_hf.main(export) == 0
    text = [f"a={given / 'text.txt'}", "--train-tokenizer", "300", "--document-bytes", "200"]
    return {
        "prepare_data": Command(
            prepare_data.main,
            lambda folder: [*text, "--workers", "1", "--output", str(folder / "out")],
            lambda out: out.exists() and not list(data_problems(out)),
            same_files,
        ),
        "export": Command(
            convert_hf.main,
            lambda folder: [export[0], export[1], str(folder / "out"), *export[3:]],
            lambda out: out.exists(),
            same_files,
        ),
        "import": Command(
            convert_hf.main,
            lambda folder: ["import", str(given / "hf"), str(folder / "out"), "--config", config],
            is_checkpoint,
            same_import,
        ),
    }


NAMES = ("prepare_data", "export", "import")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_command_works_when_given_again(name, kills, commands, tmp_path) -> None:
    """Commands are killed at `kills` random moments."""
    command, chance = commands[name], random.Random(name)
    began = time.monotonic()
    assert whole(command, tmp_path / "whole") == 0
    seconds = time.monotonic() - began
    for number in range(kills):
        place = tmp_path / f"killed {number}"
        process = start(command, place)
        process.join(chance.random() * seconds)
        process.kill()
        process.join()
        out = place / "out"
        there = out.exists()
        if there:
            assert command.accepted(out)
            assert command.equal(out, tmp_path / "whole" / "out"), f"kill {number}"
        # An export or import that was complete before the kill does not replace itself.
        expected = 2 if there and command.main is convert_hf.main else 0
        assert whole(command, place) == expected, f"kill {number}"
        assert command.equal(out, tmp_path / "whole" / "out"), f"kill {number}"
        # The empty lock of a command that died between its last two calls also remains.
        locks = {"out.preparing.lock"} if expected else set()
        assert {path.name for path in place.iterdir()} - locks == {"out"}, f"kill {number}"
        shutil.rmtree(place)
