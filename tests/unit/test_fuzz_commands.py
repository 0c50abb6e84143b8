"""Whatever is in the files that a command reads: a code and lines.

Each file is damaged in a two-thousandth of FUZZ_CASES ways.
"""

import contextlib
import io
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from scripts.convert_hf import main as convert
from scripts.generate import main as generate
from scripts.plot import main as plot
from scripts.verify import main as verify
from tests.fuzzed import damage, damages
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.token_files import prepare_text
from tests.unit.test_fuzz import CASES, SECONDS, Watched, run
from training.run import train

STUDY = ROOT / "studies/optimizers/results/llama_0.1m/results.json"
PLACE = "{place}"
"""Stands for the folder that a case has for itself."""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@dataclass(frozen=True)
class Command:
    """A command and its right arguments, and the folder of which it reads a copy."""

    main: Callable[[Sequence[str]], int]
    arguments: tuple[str, ...]
    source: str


COMMANDS = {
    "verify a run": Command(verify, (PLACE,), "run"),
    "verify data": Command(verify, (PLACE,), "data"),
    "plot": Command(plot, (PLACE, "--html"), "run"),
    "plot compare": Command(plot, ("compare", PLACE), "run"),
    "plot spectrum": Command(plot, ("spectrum", PLACE, "--output", "{place}/o.svg"), "run"),
    "plot study": Command(plot, ("study", "{place}/results.json", "--output", "o.svg"), "study"),
    "export": Command(convert, ("export", PLACE, "{place}/out", "--no-verify"), "run"),
    "import": Command(
        convert, ("import", PLACE, "{place}/out", "--config", "{place}/own.yaml"), "exported"
    ),
    "generate from a run": Command(generate, (PLACE, "A matrix", "--tokens", "2"), "run"),
    "generate": Command(generate, (PLACE, "A matrix", "--tokens", "2"), "exported"),
}


@pytest.fixture
def folders(tmp_path: Path, world: Any) -> Path:
    """A prepared folder, a run on it, its export, and the results of a study."""
    place = tmp_path
    prepare_text(place, "A matrix has {i} rows.\n\n", 400).rename(place / "data")
    config = tiny_config(
        str(place),
        model__vocab_size=300,
        data__train__walk__path=f"{place}/data/tokens.train",
        data__validation__walk__path=f"{place}/data/tokens.train",
        validation__samples=2,
        train__exit_step=2,
        checkpoint__interval=2,
        log__interval=1,
        monitors__interval=1,
        run__dir=f"{place}/run",
    )
    train(config, world)
    assert convert(["export", f"{place}/run", f"{place}/exported", "--no-verify"]) == 0
    shutil.copy(place / "run/config.yaml", place / "exported/own.yaml")
    (place / "study").mkdir()
    shutil.copy(STUDY, place / "study/results.json")
    return place


def called(watched: Watched, command: Command, arguments: Sequence[str], place: str) -> None:
    """Call a command in a folder; its code must be 0, 1 or 2, and what it says not a traceback."""
    words = [word.replace(PLACE, place) for word in arguments]
    with (
        watched.case((words, arguments)),
        contextlib.chdir(place),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            code: Any = command.main(words)
        except SystemExit as end:  # of argparse
            code = end.code
    assert code in (0, 1, 2), (words, code)
    if code:
        assert out.getvalue().strip() or said.getvalue().strip(), words
    assert "Traceback" not in said.getvalue(), words
    watched.ends[f"code {code}"] += 1


def unharmed(watched: Watched, command: Command, folders: Path) -> None:
    """Call a command as it is meant to be; a case may take a few seconds longer than this."""
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place) / "copy"
        shutil.copytree(folders / command.source, copied)
        before, start = Counter(watched.ends), time.process_time()
        watched.allowed = float("inf")
        called(watched, command, command.arguments, str(copied))
        watched.allowed = SECONDS + 2 * (time.process_time() - start)
    assert (watched.ends - before)["code 0"] == 1, command


def test_damaged_files_of_commands(folders: Path) -> None:
    """One file of those that a command reads is damaged, as often as it has files."""
    cases = max(CASES // 2000, 1)
    watched = Watched()
    for command in COMMANDS.values():
        unharmed(watched, command, folders)
        source = folders / command.source
        names = [str(p.relative_to(source)) for p in sorted(source.rglob("*")) if p.is_file()]

        def one(
            how: tuple[str, tuple[str, float, bytes]],
            command: Command = command,
            source: Path = source,
        ) -> None:
            name, damaged = how
            with tempfile.TemporaryDirectory() as place:
                copied = Path(place) / "copy"
                shutil.copytree(source, copied)
                damage(copied / name, damaged)
                called(watched, command, command.arguments, str(copied))

        run(math.ceil(cases * len(names)), st.tuples(st.sampled_from(names), damages()), one)
    watched.report("files of commands")
