"""Run a function on several gloo ranks and collect the results.

    results = run_on_ranks(2, "tests.distributed.workers", "curves", {"tensor": 2})

calls `workers.curves(tensor=2)` on every rank, with the same environment as under torchrun, and
returns the ranks' results in rank order. Arguments and results must be supported by torch.save and
by weights_only loading.

Ranks are forked from a process that has already imported torch and Megatron, because importing them
takes longer than most tests.
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
# Leave out tests.import_engine, which defers loading torch's compiler: FSDP2 needs the compiler,
# and loading it once before forking is faster than loading it in every fork.
FORKS.set_forkserver_preload(["tests.frozen"])
OURS = r"(models|parallel|spectral|tests|training)\."
"""Modules in which warnings are errors, such as deprecation warnings from newer torch versions."""
GRACE = 30.0
"""Seconds that the other ranks get to exit after one has failed, as under torchrun."""


def run_on_ranks(
    ranks: int, module: str, function: str, arguments: dict[str, Any], timeout: float = 840
) -> list[Any]:
    """Run `module.function(**arguments)` on `ranks` processes and return the results in rank order.

    Raises AssertionError with the output of all ranks if one of them fails or they take more than
    `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        start_forks()
        folder = Path(name)
        torch.save(arguments, folder / "arguments.pt")
        # As in torchrun's agent, so that the port cannot be taken by another test.
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
            outputs = [f"rank {rank}:\n{output(folder, rank)}" for rank in range(ranks)]
            raise AssertionError("\n".join([problem, *outputs]))
        return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def awaited(processes: list[BaseProcess], timeout: float) -> str:
    """Wait for all processes. Return '' if all succeed, else the reason for the failure. No process
    is left running, even if the wait is interrupted."""
    end = time.monotonic() + timeout
    problem = ""
    try:
        while (alive := [p for p in processes if p.is_alive()]) and time.monotonic() < end:
            connection.wait([p.sentinel for p in alive], timeout=max(end - time.monotonic(), 0))
            failed = [rank for rank, process in enumerate(processes) if process.exitcode]
            if failed and not problem:
                codes = [f"rank {rank} exited with {processes[rank].exitcode}" for rank in failed]
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
    """Return the last lines of a rank's stdout and stderr: enough for the traceback, but short
    enough not to be truncated in a log."""
    file = folder / f"{rank}.txt"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return "\n".join(lines[-60:])


def environment() -> dict[str, str]:
    """Return the environment for rank processes: one thread, and the repository on the path."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Keep paths that take precedence over installed packages, such as a different engine's.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
    }


def start_forks() -> None:
    """Start the fork server in the environment of the ranks.

    Some variables are only read when Python or torch starts.
    """
    with patch.dict(os.environ, environment()):
        forkserver.ensure_running()


def main(folder: Path, variables: dict[str, str], module: str, function: str) -> None:
    """Run a function on a rank and save its result."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    rank = variables["RANK"]
    log = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.filterwarnings("error", module=OURS)
    # Some functions compare with an optimizer that does not use the other ranks.
    warnings.filterwarnings("ignore", "replicas is None")
    arguments = torch.load(folder / "arguments.pt")
    result = getattr(import_module(module), function)(**arguments)
    torch.save(result, folder / f"{rank}.pt")
