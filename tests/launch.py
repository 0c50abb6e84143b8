"""Runs a function on several gloo ranks and brings its results back.

    results = run_on_ranks(2, "tests.distributed.workers", "curves", {"tensor": 2})

starts torchrun with this file, calls `workers.curves(tensor=2)` on every rank and returns what the
ranks returned, in rank order. Arguments and results are what torch.save and weights_only load take.
"""

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def run_on_ranks(
    ranks: int, module: str, function: str, arguments: dict[str, Any], timeout: float = 840
) -> list[Any]:
    """The results of `module.function(**arguments)` on `ranks` processes, in rank order.

    Raises AssertionError with the output of the ranks if one of them fails or `timeout`, in
    seconds, passes.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, Path(folder) / "arguments.pt")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "tests.launch", folder, module, function]
        agent = subprocess.Popen(
            command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True, env=environment()
        )
        try:
            printed, said = agent.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            agent.terminate()  # and so its ranks, which would outlive a killed agent
            printed, said = agent.communicate(timeout=60)
            raise AssertionError(f"not done in {timeout:g} seconds\n{printed}\n{said}") from None
        # What follows the agent's own report only repeats that a rank failed.
        own, _, _ = said.partition("torch/distributed/elastic")
        assert agent.returncode == 0, f"{printed}\n{own}"
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def environment() -> dict[str, str]:
    """The environment of rank processes: one thread each, importable repository."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }


def main(folder: str, module: str, function: str) -> None:
    """None; what each rank runs."""
    arguments = torch.load(Path(folder) / "arguments.pt")
    result = getattr(import_module(module), function)(**arguments)
    torch.save(result, Path(folder) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
