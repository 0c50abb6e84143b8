"""Whatever is in a config: it is accepted or refused with a line, in bounded time.

`FUZZ_CASES=20000 make test-all PART=fuzz` runs that many cases, by default a tenth of them.
"""

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

import pretrain
from tests.fuzzed import Keys, changes, replaced
from tests.run_configs import tiny_config
from tests.unit.training.checkpoint.test_identity import EVERY_SECTION
from training.config import check, load_config, to_yaml
from training.errors import InputError

SECONDS = 10.0
"""What one case may take."""
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
"""Configs; one in 40 is planned."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@contextlib.contextmanager
def case(what: object, seconds: float = SECONDS) -> Iterator[None]:
    """Context of one case, which may raise InputError and must not take long."""
    start = time.process_time()
    try:
        yield
    except InputError as error:
        assert str(error).strip(), what
    assert time.process_time() - start < seconds, what


def run(cases: int, strategy: Any, call: Callable[[Any], None]) -> None:
    """Call with that many examples of a strategy."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    test = given(strategy)(lambda case: call(case))
    settings(max_examples=cases, suppress_health_check=quiet)(test)()


def test_many_configs(folder: str) -> None:
    """Every run that is accepted is planned, of the first cases."""
    whole = yaml.safe_load(to_yaml(tiny_config(folder, "muon", **EVERY_SECTION)))
    contents = cycle([whole, yaml.safe_load(Path(folder, "config.yaml").read_text())])
    more: list[Keys] = [("optimizer", "roles", "o"), ("data", "train", "b"), ("base",), ("nokey",)]
    number, path = count(), Path(folder, "fuzzed.yaml")

    def one(changed: dict[Keys, Any]) -> None:
        content = next(contents)
        for keys, value in changed.items():
            with contextlib.suppress(TypeError):  # a section is a value by now
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
                assert all(line.startswith("error: ") for line in said.getvalue().splitlines())

    run(CASES, changes(whole, more), one)
