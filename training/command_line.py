"""Command-line options, launcher variables, and error reporting.

After an error, a command exits with the code returned by `fail`."""

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from training.errors import ConfigError, printable

PATIENCE: Final = 5.0
"""Seconds that ranks other than 0 wait for torchrun to stop them before they print an error."""


class Parser(argparse.ArgumentParser):
    """Command-line parser that rejects an option given twice with different values."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)


class _StoreOnce(argparse._StoreAction):
    """Store action of `Parser`."""

    given: tuple[argparse.Namespace, Any] | None = None
    """The last namespace in which the option was set, and the option's value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        line, before = self.given or (None, values)
        if option_string is not None and line is namespace and before != values:
            raise argparse.ArgumentError(
                self, f"must be given only once, got {before}, then {values}"
            )
        self.given = namespace, values
        super().__call__(parser, namespace, values, option_string)


def print_error(error: object) -> None:
    """Print each line of an error to stderr as `error: ...`."""
    for line in printable(str(error)).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


LAUNCHED: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT",
    "SPECTRAIN_LAUNCHER",
)  # fmt: skip
"""Environment variables that launchers set to non-negative integers."""
PROCESS_COUNTS: Final = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
"""Environment variables in which other launchers store their number of processes."""
LAST_PORT: Final = 65535


def own_rank() -> int:
    """Return the global rank, or 0 if RANK is unset or invalid."""
    text = os.environ.get("RANK", "0")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def check_launched() -> None:
    """Raise ConfigError if a launcher variable is not a valid number, rank or port."""
    given = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    problems = [
        f"the environment variable {name} must be a non-negative integer, got {text!r:.40}"
        for name, text in given.items()
        if not re.fullmatch("[0-9]{1,9}", text)
    ]
    if not problems and own_rank() >= int(given.get("WORLD_SIZE", "1")):
        size = given.get("WORLD_SIZE", "1 (not set)")
        problems = [
            f"the environment variable RANK must be below WORLD_SIZE = {size}, got {own_rank()}"
        ]
    if not problems and int(port := given.get("MASTER_PORT", "0")) > LAST_PORT:
        problems = [f"the environment variable MASTER_PORT must be at most {LAST_PORT}, got {port}"]
    if problems:
        raise ConfigError("\n".join(problems))


def check_single() -> None:
    """Raise ConfigError if srun, mpirun or mpiexec has started several processes without setting
    WORLD_SIZE: each process would train its own run."""
    for name, launcher in {} if "WORLD_SIZE" in os.environ else PROCESS_COUNTS.items():
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{launcher} started {count} processes, each of which would train a separate run, "
                "because WORLD_SIZE is not set: start one torchrun per node. In an interactive "
                f"shell of {launcher}, run `unset {name}` first"
            )


def fail(error: object, *, code: int, same_on_all_ranks: bool = True) -> int:
    """Print an error, one line per problem, and return the exit code `code`.

    With `same_on_all_ranks`, rank 0 prints the error, and the other ranks wait for torchrun to stop
    them. A rank that torchrun does not stop then prints the error, prefixed with its rank and host.
    """
    rank = own_rank()
    if rank > 0 and same_on_all_ranks:
        time.sleep(PATIENCE)  # torchrun stops all ranks when one exits
        source = f"rank {rank} (host {socket.gethostname()})"
        error = "\n".join(f"{source}: {line}" for line in str(error).splitlines())
    print_error(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:  # torchrun copies the message in this file to its final report
        with contextlib.suppress(OSError):
            text = json.dumps({"message": str(error), "timestamp": str(int(time.time()))})
            Path(path).write_text(text, encoding="utf-8")
    return code
