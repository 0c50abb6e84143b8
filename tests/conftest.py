"""Settings for all tests: one thread, fixed seeds, no downloads, no state shared between tests."""

import functools
import gc
import os

# Objects created by imports and test collection live until the end, so the garbage collector need
# not scan them.
gc.disable()

# Set before importing torch, because OpenMP reads it only once. Rank processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"

import random  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# Use the same examples on every machine, with no deadline per example, because machines are shared.
hypothesis.settings.register_profile(
    "spectrain", deadline=None, derandomize=True, print_blob=True, max_examples=30
)
hypothesis.settings.load_profile("spectrain")

import tests.import_engine  # noqa: E402, F401
from tests.paths import ROOT  # noqa: E402
from tests.processor_time import ProcessorTime, turn  # noqa: E402

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

    from parallel.comm.groups import Groups

VISIBLE = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
"""The visible GPUs, which CPU-only commands hide."""
IMPORTED = pytest.StashKey[int]()
"""Number of modules imported when objects were last excluded from garbage collection."""
TOGETHER = ("tests/distributed/", "tests/rehearsal/")
"""Folders whose test files run on the same worker, because the fork server takes seconds to start.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that reports CPU time."""
    parser.addoption(
        "--processor-seconds", action="store_true", help="report the processor seconds of files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure CPU time if requested."""
    if config.getoption("--processor-seconds"):
        config.pluginmanager.register(ProcessorTime())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: "Producer"
) -> "LoadFileScheduling | None":
    """Keep the files of each folder in `TOGETHER` on one worker, unless slow tests run."""
    if config.option.dist != "loadfile" or config.option.markexpr != "not slow":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    return Scheduling(config, log)  # without a log, every finished test would print a line


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slowest files. Skip tests in tests/gpu if there is no CUDA device."""
    items.sort(key=lambda item: turn(item.nodeid.partition("::")[0]))
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "gpu"):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Exclude all existing objects from garbage collection.

    Also cache their count, because every run checks it at startup and counting takes 50 ms.
    """
    gc.freeze()
    gc.enable()
    frozen, count = gc.get_freeze_count(), gc.get_freeze_count
    gc.get_freeze_count = functools.wraps(count)(lambda: frozen)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude everything that earlier tests imported from garbage collection. Runs collect at
    startup and every ten steps, which takes 0.1 s once transformers and datasets are imported."""
    if item.config.stash.get(IMPORTED, 0) != len(sys.modules):
        gc.collect()
        gc.freeze()
        item.config.stash[IMPORTED] = len(sys.modules)


@pytest.fixture(autouse=True)
def _seeded_and_unchanged() -> Iterator[None]:
    """Seed all generators before a test, and restore torch's default dtype and the visible GPUs
    after it.

    Tests that change the working directory fail.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, directory = torch.get_default_dtype(), Path.cwd()
    yield
    torch.set_default_dtype(dtype)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(VISIBLE)
    assert Path.cwd() == directory


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[int], str]:
    """A function that checks that a command exited with code 2 and returns its errors."""

    def errors(code: int) -> str:
        assert code == 2
        return capsys.readouterr().err

    return errors


@pytest.fixture
def world() -> Iterator["Groups"]:
    """Process groups for a single process: gloo, or NCCL on a GPU."""
    from parallel.comm import groups  # deferred: slow import

    yield groups.initialize()
    groups.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the token set `tokens`."""
    from tests.token_files import write_token_set  # deferred: slow import

    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `folder`, but shared by all tests in a module."""
    from tests.token_files import write_token_set  # deferred: slow import

    folder = tmp_path_factory.mktemp("shared")
    write_token_set(folder / "tokens", tokens=8_000, vocab=120, seed=0)
    return folder


@pytest.fixture
def no_memory_is_zero() -> Iterator[None]:
    """Fill uninitialized tensors with NaN, because they might contain any value."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT
