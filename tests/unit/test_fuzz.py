"""Whatever is in a config or a file: exit 0 or 2 with a line each, in bounded time and memory.

`FUZZ_CASES=20000 make test-all PART=fuzz` runs that many cases, by default a tenth of them.
"""

import contextlib
import io
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

import pretrain
from tests.config_values import Keys, replaced
from tests.fuzzed import changes
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from tests.unit.training.checkpoint.test_identity import EVERY_SECTION
from training.config import check, load_config, to_yaml
from training.errors import InputError

SECONDS, BYTES = 10.0, 2 << 30
"""What one case may take."""
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
"""Configs of the large part; one in 40 is planned."""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


class Watched:
    """Counter of cases and of how they ended; fails for one that takes too long or too much."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.slowest = 0.0
        self.allowed = SECONDS
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @contextlib.contextmanager
    def case(self, what: object) -> Iterator[None]:
        """Context of one case, which may raise InputError."""
        start = time.process_time()
        try:
            yield
            self.ends["accepted"] += 1
        except InputError as error:
            assert str(error).strip(), what
            self.ends["refused"] += 1
        taken = time.process_time() - start
        self.slowest = max(self.slowest, taken)
        assert taken < self.allowed, (what, taken)

    def report(self, name: str) -> None:
        """Print how many cases there were, and check the memory of all."""
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before) << 10
        said = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        print(f"{name}: {said}; slowest {self.slowest:.1f} s, memory grew {grown >> 20} MiB")
        assert grown < BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token set, and a config that has every section."""
    place = tmp_path_factory.mktemp("fuzz")
    write_token_set(place / "tokens", tokens=4_000, vocab=120, seed=0)
    config = tiny_config(str(place), "muon", **EVERY_SECTION)
    (place / "whole.yaml").write_text(to_yaml(config))
    tiny_config(str(place))
    return place


def run(cases: int, strategy: Any, call: Callable[[Any], None]) -> None:
    """Call with that many examples of a strategy."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    test = given(strategy)(lambda case: call(case))
    settings(max_examples=cases, suppress_health_check=quiet)(test)()


def fuzz_configs(folder: Path, cases: int, planned: int) -> None:
    """Load `cases` configs; plan every run that is accepted, of the first `planned` cases."""
    contents = [
        yaml.safe_load((folder / name).read_text()) for name in ("whole.yaml", "config.yaml")
    ]
    more: list[Keys] = [("optimizer", "roles", "o"), ("data", "train", "b"), ("base",), ("nokey",)]
    watched = Watched()

    def one(changed: dict[Keys, Any]) -> None:
        content = contents[sum(watched.ends.values()) % 2]
        for path, value in changed.items():
            with contextlib.suppress(TypeError):  # a section is a value by now
                content = replaced(content, path, value)
        path = folder / "fuzzed.yaml"
        path.write_text(yaml.safe_dump(content))
        with watched.case(changed):
            config = load_config(path)
            check(config, config.parallel.model_ranks)
        if sum(watched.ends.values()) <= planned:
            with watched.case(changed), contextlib.redirect_stdout(io.StringIO()):
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    code = pretrain.main(["--config", str(path), "--dry-run"])
                assert code in (0, 2), changed
                assert all(line.startswith("error: ") for line in said.getvalue().splitlines())

    run(cases, changes(contents[0], more), one)
    watched.report("configs")


def test_many_configs(folder: Path) -> None:
    fuzz_configs(folder, CASES, planned=CASES // 40)
