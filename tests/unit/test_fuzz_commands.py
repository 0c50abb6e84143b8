"""Whatever is in the files that a command reads: a code and lines.

Each file is damaged in a two-thousandth of FUZZ_CASES ways.
"""

import contextlib
import io
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import strategies as st

import pretrain
from scripts.convert_hf import main as convert
from scripts.generate import main as generate
from scripts.plot import main as plot
from scripts.verify import main as verify
from tests.fuzzed import damage, damages
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.token_files import prepare_text
from tests.unit.test_fuzz import CASES, SECONDS, case, run

IMPORT = ("import", "{place}", "{place}/out", "--config", "{place}/own.yaml")
STUDY = ROOT / "studies/optimizers/results/llama_0.1m/results.json"
PLACE = "{place}"
"""Stands for the folder that a case has for itself."""

Command = tuple[Callable[[Sequence[str]], int], tuple[str, ...], str]
"""A command, its right arguments, and the folder of which it reads a copy."""
COMMANDS: dict[str, Command] = {
    "verify a run": (verify, (PLACE,), "run"),
    "verify data": (verify, (PLACE,), "data"),
    "plot": (plot, (PLACE, "--html"), "run"),
    "plot compare": (plot, ("compare", PLACE), "run"),
    "plot spectrum": (plot, ("spectrum", PLACE, "--output", "{place}/o.svg"), "run"),
    "plot study": (plot, ("study", "{place}/results.json", "--output", "o.svg"), "study"),
    "export": (convert, ("export", PLACE, "{place}/out", "--no-verify"), "run"),
    "import": (convert, IMPORT, "exported"),
    "generate from a run": (generate, (PLACE, "A matrix", "--tokens", "2"), "run"),
    "generate": (generate, (PLACE, "A matrix", "--tokens", "2"), "exported"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder, a run on it, its export, and the results of a study."""
    place = tmp_path_factory.mktemp("folders")
    prepare_text(place, "A matrix has {i} rows.\n\n", 400).rename(place / "data")
    tiny_config(str(place))
    sets = [f"data.{kind}.walk.path={place}/data/tokens.train" for kind in ("train", "validation")]
    keys = ["model.vocab_size=300", "validation.samples=2", "train.exit_step=2", *sets]
    keys += ["checkpoint.interval=2", "log.interval=1", "monitors.interval=1"]
    assert pretrain.main(["--config", f"{place}/config.yaml", *keys]) == 0
    assert convert(["export", f"{place}/run", f"{place}/exported", "--no-verify"]) == 0
    shutil.copy(place / "run/config.yaml", place / "exported/own.yaml")
    (place / "study").mkdir()
    shutil.copy(STUDY, place / "study/results.json")
    return place


def called(command: Command, place: Path, seconds: float) -> Any:
    """Call a command in a folder and return its code, which must be 0, 1 or 2."""
    main, arguments, _ = command
    words = [word.replace(PLACE, str(place)) for word in arguments]
    with (
        case(words, seconds),
        contextlib.chdir(place),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            code: Any = main(words)
        except SystemExit as end:  # of argparse
            code = end.code
    assert code in (0, 1, 2), (words, code)
    assert code == 0 or out.getvalue().strip() or said.getvalue().strip(), words
    assert "Traceback" not in said.getvalue(), words
    return code


@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_file_of_a_command(name: str, folders: Path) -> None:
    """One file of those that it reads is damaged, as often as it has files."""
    command = COMMANDS[name]
    source = folders / command[2]
    names = [str(p.relative_to(source)) for p in sorted(source.rglob("*")) if p.is_file()]
    with TemporaryDirectory() as place:
        start = time.process_time()
        assert called(command, shutil.copytree(source, Path(place) / "copy"), math.inf) == 0
        seconds = SECONDS + 2 * (time.process_time() - start)

    def one(how: tuple[str, tuple[str, float, bytes]]) -> None:
        with TemporaryDirectory() as place:
            copied = shutil.copytree(source, Path(place) / "copy")
            damage(copied / how[0], how[1])
            called(command, copied, seconds)

    cases = max(CASES // 2000, 1) * len(names)
    run(cases, st.tuples(st.sampled_from(names), damages()), one)
