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
"""Imports of a run, some only during training."""


class Worker:
    """The client side: one run at a time, in the worker's initial environment."""

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
        """Return the exit code of pretrain.py, with output in `log`, and its processor seconds.

        Raises RuntimeError if the worker has ended; its stderr states the reason.
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
        """End the idle worker."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def serve() -> None:
    """Answer requests on standard input until its end or Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        from models.engine import import_engine  # imported here, as it takes seconds

        import_engine()
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()
        for line in sys.stdin:
            asked = json.loads(line)
            code, seconds = run_forked(asked["arguments"], asked["log"])
            print(json.dumps({"code": code, "seconds": seconds}), flush=True)


def run_forked(arguments: Sequence[str], log: str) -> tuple[int, float]:
    """Return exit code and processor seconds of a training fork, including its children."""
    child = os.fork()
    if child == 0:
        os._exit(train(arguments, log))
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def train(arguments: Sequence[str], log: str) -> int:
    """Return the exit code of pretrain.py in the fork, with output in `log`."""
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
