"""Runs of pretrain.py for tests of many runs: forks of a process that has imported it.

A worker reads a line of JSON for each run, the `arguments` of pretrain.py and its `log`, and
answers with the exit code and the processor `seconds`.
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
"""What a run imports, some of it only when it trains."""


class Worker:
    """The side that asks: one run at a time, in the environment that the worker began with."""

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
        """Exit code of pretrain.py, which writes its output to `log`, and its processor seconds.

        Raises RuntimeError if the worker has ended, which says why on stderr.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"arguments": list(arguments), "log": str(log)}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks runs ended with {self._process.wait()}")
        found = json.loads(answer)
        return found["code"], found["seconds"]

    def close(self) -> None:
        """End the worker, which waits for nothing by then."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def serve() -> None:
    """Answer standard input until it ends, or until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        from models.engine import import_engine  # here: it takes seconds

        import_engine()
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()
        for line in sys.stdin:
            asked = json.loads(line)
            code, seconds = run_forked(asked["arguments"], asked["log"])
            print(json.dumps({"code": code, "seconds": seconds}), flush=True)


def run_forked(arguments: Sequence[str], log: str) -> tuple[int, float]:
    """Exit code and processor seconds of a fork that trains, children of its own included."""
    child = os.fork()
    if child == 0:
        os._exit(train(arguments, log))
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def train(arguments: Sequence[str], log: str) -> int:
    """Exit code of pretrain.py with its output in `log`, from the fork."""
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
