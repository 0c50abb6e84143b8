"""Any config is either accepted or rejected with an error message, in bounded time. Whatever its
files contain, a command exits with a valid code and prints error lines.

`FUZZ_CASES=20000 make test-all PART=fuzz` tests 20,000 configs instead of 2,000. The number of ways
in which each file of a command is damaged is `FUZZ_CASES` / 2000.
"""

import contextlib
import io
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pretrain
from scripts.convert_hf import main as convert
from scripts.generate import main as generate
from scripts.plot import main as plot
from scripts.verify import main as verify
from tests.fuzzed import Keys, changes, damage, damages, replaced
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.token_files import prepare_text
from tests.unit.training.checkpoint.test_resume import EVERY_SECTION
from training.config import check, load_config, to_yaml
from training.errors import InputError

SECONDS = 10.0
"""Time limit for one case, in seconds."""
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
"""Number of configs. One in 40 is also planned."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@contextlib.contextmanager
def case(what: object, seconds: float = SECONDS) -> Iterator[None]:
    """Context manager that checks that a case raises no error other than InputError and meets the
    time limit."""
    start = time.process_time()
    try:
        yield
    except InputError as error:
        assert str(error).strip(), what
    assert time.process_time() - start < seconds, what


def run(cases: int, strategy: Any, call: Callable[[Any], None]) -> None:
    """Call a function with `cases` examples drawn from a strategy."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    test = given(strategy)(lambda case: call(case))
    settings(max_examples=cases, suppress_health_check=quiet)(test)()


def test_many_configs(folder: str) -> None:
    """Configs that are accepted are also planned, but only among the first cases."""
    whole = yaml.safe_load(to_yaml(tiny_config(folder, "muon", **EVERY_SECTION)))
    contents = cycle([whole, yaml.safe_load(Path(folder, "config.yaml").read_text())])
    more: list[Keys] = [("optimizer", "roles", "o"), ("data", "train", "b"), ("base",), ("nokey",)]
    number, path = count(), Path(folder, "fuzzed.yaml")

    def one(changed: dict[Keys, Any]) -> None:
        content = next(contents)
        for keys, value in changed.items():
            with contextlib.suppress(TypeError):  # a section has become a value
                content = replaced(content, keys, value)
        path.write_text(yaml.safe_dump(content))
        with case(changed):
            config = load_config(path)
            check(config, config.parallel.model_ranks)
        if next(number) < CASES // 40:
            with case(changed), contextlib.redirect_stdout(io.StringIO()):
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    code = pretrain.main(["--config", str(path), "--dry-run"])
                assert code in (0, 2), changed
                lines = said.getvalue().splitlines()
                assert all(line.startswith(("error: ", "warning: ")) for line in lines)

    run(CASES, changes(whole, more), one)


IMPORT = ("import", "{place}", "{place}/out", "--config", "{place}/own.yaml")
STUDY = ROOT / "studies/optimizers/results/llama_0.1m/results.json"
PLACE = "{place}"
"""Placeholder for the folder of a case."""

Command = tuple[Callable[[Sequence[str]], int], tuple[str, ...], str]
"""A command, valid arguments, and the folder that is copied for the command to read."""
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with prepared data, a run on this data, the run's export, and the results of a
    study."""
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
    """The command's files are damaged one by one."""
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
