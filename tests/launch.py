"""Runs a function on several gloo ranks and brings its results back.

    results = run_on_ranks(2, "tests.distributed.workers", "curves", {"tensor": 2})

calls `workers.curves(tensor=2)` on every rank, with the environment that torchrun gives its ranks,
and returns what the ranks returned, in rank order. torch.save and weights_only loading must support
arguments and results.

Ranks are forks of one process that has imported torch and Megatron, as importing takes longer than
most tests.
"""

import multiprocessing
import os
import tempfile
import time
import warnings
from importlib import import_module
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import TCPStore

from tests.paths import ROOT

FORKS = multiprocessing.get_context("forkserver")
# Without tests.import_engine: FSDP2 loads torch's compiler, which is slow in every fork and fast
# before forking.
FORKS.set_forkserver_preload(["tests.frozen"])
OURS = r"(models|parallel|spectral|tests|training)\."
"""Modules whose warnings are errors, such as newer torch's warnings about calls."""
GRACE = 30.0
"""Seconds for other ranks to end after one has failed, as under torchrun."""


def run_on_ranks(
    ranks: int, module: str, function: str, arguments: dict[str, Any], timeout: float = 840
) -> list[Any]:
    """Return the results of `module.function(**arguments)` on `ranks` processes, in rank order.

    Raises AssertionError with the output of the ranks if one of them fails or `timeout`, in
    seconds, passes.
    """
    with tempfile.TemporaryDirectory() as name:
        start_forks()
        folder = Path(name)
        torch.save(arguments, folder / "arguments.pt")
        # As in torchrun's agent, so that no other test can take the port.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = environment() | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            variables = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = FORKS.Process(target=main, args=(folder, variables, module, function))
            process.start()
            processes.append(process)
        problem = awaited(processes, timeout)
        if problem:
            said = [f"rank {rank}:\n{output(folder, rank)}" for rank in range(ranks)]
            raise AssertionError("\n".join([problem, *said]))
        return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def awaited(processes: list[BaseProcess], timeout: float) -> str:
    """Return '' if all processes succeed, else the reason for the failure. No process is running
    afterwards, even if the wait was interrupted."""
    end = time.monotonic() + timeout
    problem = ""
    try:
        while (alive := [p for p in processes if p.is_alive()]) and time.monotonic() < end:
            connection.wait([p.sentinel for p in alive], timeout=max(end - time.monotonic(), 0))
            failed = [rank for rank, process in enumerate(processes) if process.exitcode]
            if failed and not problem:
                codes = [f"rank {rank} ended with {processes[rank].exitcode}" for rank in failed]
                problem = ", ".join(codes)
                end = min(end, time.monotonic() + GRACE)
                for process in processes:
                    process.terminate()
        return problem or (f"not done in {timeout:g} seconds" if alive else "")
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def output(folder: Path, rank: int) -> str:
    """Return the last lines of a rank's output, of both streams: its traceback, and so little
    before it that a log is not cut there."""
    file = folder / f"{rank}.txt"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return "\n".join(lines[-60:])


def environment() -> dict[str, str]:
    """Return the environment of processes: one thread, and an importable repository."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Keep paths before the installed packages, such as another engine's.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
    }


def start_forks() -> None:
    """Start the process that forks ranks, in the ranks' environment.

    Some variables are read only when Python or torch starts.
    """
    with patch.dict(os.environ, environment()):
        forkserver.ensure_running()


def main(folder: Path, variables: dict[str, str], module: str, function: str) -> None:
    """Run a function on one rank and save its result."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    rank = variables["RANK"]
    said = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    warnings.filterwarnings("error", module=OURS)
    arguments = torch.load(folder / "arguments.pt")
    result = getattr(import_module(module), function)(**arguments)
    torch.save(result, folder / f"{rank}.pt")
