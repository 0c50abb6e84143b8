"""Settings of every test: one thread, fixed seeds, no downloads, no state carried over."""

import functools
import gc
import os

# Objects made by imports and collection live to the end, so garbage collection need not search
# them.
gc.disable()

# Set before torch is imported, as OpenMP reads it once. Rank processes inherit it.
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

# The same examples on every machine, and no time limit per example: machines are shared.
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
"""The visible GPUs, which commands without GPUs hide."""
IMPORTED = pytest.StashKey[int]()
"""Number of imported modules when existing objects were last excluded from garbage collection."""
TOGETHER = ("tests/distributed/", "tests/rehearsal/")
"""Folders whose files run on one worker, as starting a process that forks takes seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option to print processor time."""
    parser.addoption(
        "--processor-seconds", action="store_true", help="report the processor seconds of files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure processor time if requested."""
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

    return Scheduling(config, log)  # without a log, each test's end would print a line


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slowest files; skip tests of tests/gpu without a CUDA device."""
    items.sort(key=lambda item: turn(item.nodeid.partition("::")[0]))
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "gpu"):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Exclude all existing objects from garbage collection.

    Every start of a run asks whether objects are frozen, and counting them takes 50 ms.
    """
    gc.freeze()
    gc.enable()
    frozen, count = gc.get_freeze_count(), gc.get_freeze_count
    gc.get_freeze_count = functools.wraps(count)(lambda: frozen)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude what earlier tests imported from garbage collection: every run collects at its start
    and every ten steps, which takes 0.1 s after an import of transformers and datasets."""
    if item.config.stash.get(IMPORTED, 0) != len(sys.modules):
        gc.collect()
        gc.freeze()
        item.config.stash[IMPORTED] = len(sys.modules)


@pytest.fixture(autouse=True)
def _seeded_and_unchanged() -> Iterator[None]:
    """Seed every generator before a test; restore torch's default dtype and visible GPUs after it.

    A test that leaves another working directory behind fails.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, place = torch.get_default_dtype(), Path.cwd()
    yield
    torch.set_default_dtype(dtype)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(VISIBLE)
    assert Path.cwd() == place


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[int], str]:
    """A function that takes the exit code of a command, which must be 2, and returns its errors."""

    def errors(code: int) -> str:
        assert code == 2
        return capsys.readouterr().err

    return errors


@pytest.fixture
def world() -> Iterator["Groups"]:
    """The process groups of one process: gloo, or NCCL on a GPU."""
    from parallel.comm import groups  # takes seconds to import

    yield groups.initialize()
    groups.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the token set `tokens`."""
    from tests.token_files import write_token_set  # takes seconds to import

    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `folder`, but one for all tests of a module."""
    from tests.token_files import write_token_set  # takes seconds to import

    folder = tmp_path_factory.mktemp("shared")
    write_token_set(folder / "tokens", tokens=8_000, vocab=120, seed=0)
    return folder


@pytest.fixture
def no_memory_is_zero() -> Iterator[None]:
    """Fill unwritten tensors with NaN, which their memory may contain."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT
