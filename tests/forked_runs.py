"""Run pretrain.py in forks of a process that has already imported it, for tests with many runs.

For each run, a worker reads a line of JSON with the `arguments` for pretrain.py and a path for its
`log`, and answers with the exit code and the CPU `seconds`.
"""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.paths import ROOT

IMPORTED: Final = ("pretrain", "parallel.comm.groups", "training.build", "training.run")
"""Modules that a run imports, some of them only during training."""


class Worker:
    """Client of a worker, which executes one run at a time in its initial environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests import forked_runs; forked_runs.serve()"],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str], log: Path) -> tuple[int, float]:
        """Run pretrain.py with its output in `log`. Return the exit code and the CPU seconds.

        Raises RuntimeError if the worker has died. The worker's stderr contains the reason.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"arguments": list(arguments), "log": str(log)}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks runs exited with {self._process.wait()}")
        response = json.loads(line)
        return response["code"], response["seconds"]

    def close(self) -> None:
        """Stop the idle worker."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def serve() -> None:
    """Serve requests from standard input until it is closed, or until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        from models.engine import import_engine  # deferred: slow import

        import_engine()
        for name in IMPORTED:
            importlib.import_module(name)
        # One heartbeat per run: a slow run must make the same calls to its files as a fast one.
        lifecycle = importlib.import_module("training.lifecycle.lifecycle")
        lifecycle.PAUSE = 1e9  # type: ignore[attr-defined]
        gc.freeze()
        for line in sys.stdin:
            request = json.loads(line)
            code, seconds = run_forked(request["arguments"], request["log"])
            print(json.dumps({"code": code, "seconds": seconds}), flush=True)


def run_forked(arguments: Sequence[str], log: str) -> tuple[int, float]:
    """Train in a fork. Return its exit code and CPU seconds, including those of its children."""
    child = os.fork()
    if child == 0:
        os._exit(train(arguments, log))
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def train(arguments: Sequence[str], log: str) -> int:
    """Run pretrain.py in this process with its output in `log`, and return the exit code."""
    import pretrain

    console = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, source in ((0, nothing), (1, console), (2, console)):
        os.dup2(source, stream)
    try:
        code = pretrain.main(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
