"""Errors in a user's input, which entry points print as `error: ...` before they exit with code 2,
and errors of optional files, which do not end a run.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from parallel.error_text import described

PATIENCE: Final = 5.0
"""Seconds that other ranks wait for torchrun to stop them after rank 0 has printed an error."""


class InputError(ValueError):
    """An invalid input; the message names the input, the rule and the value."""


class ConfigError(InputError):
    """A run config that is unreadable, incomplete or contradictory."""


class DataError(InputError):
    """Training data or a tokenizer that is missing, corrupt or unsuitable for the run."""


class MissingSetError(DataError):
    """A token set without files; `key` is its config key, outermost first, or None if unknown."""

    def __init__(self, message: str, key: tuple[str, str, str] | None = None) -> None:
        super().__init__(message)
        self.key = key


class VocabularyError(DataError):
    """A model whose vocabulary does not match its data."""


class BrokenCheckpointError(InputError):
    """A checkpoint that is incomplete or has changed since it was written."""


_COMMANDS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Replace characters that control a terminal or a page with U+FFFD.

    These are control characters except line breaks and tabs, lone surrogates (which UTF-8 cannot
    encode), and characters that change the text direction.
    """
    return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class Parser(argparse.ArgumentParser):
    """Command-line parser that refuses an option given twice with different values."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)


class _StoreOnce(argparse._StoreAction):
    """Action of a `Parser` that stores the value of an option."""

    given: tuple[argparse.Namespace, Any] | None = None
    """The last namespace in which this option was set, and its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        line, before = self.given or (None, values)
        if option_string is not None and line is namespace and before != values:
            raise argparse.ArgumentError(self, f"must be given once, got {before}, then {values}")
        self.given = namespace, values
        super().__call__(parser, namespace, values, option_string)


def near_name(path: Path) -> str:
    """Return `; did you mean PATH?` for a missing path, '' if the path exists or no name is close.

    PATH is the path with the closest name among files with the same suffix in the same folder.
    """
    from models.section import closest  # imports pydantic

    near = None
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            names = map(Path, os.listdir(path.parent))
            near = closest(path.stem, [n.stem for n in names if n.suffix == path.suffix])
    return "" if near is None else f"; did you mean {path.with_name(near + path.suffix)}?"


def print_error(error: object) -> None:
    """Print each line of an error as `error: ...` on stderr."""
    for line in printable(str(error)).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


LAUNCHED: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT",
    "SPECTRAIN_LAUNCHER",
)  # fmt: skip
"""Environment variables that a launcher sets to whole numbers."""
LAST_PORT: Final = 65535


def own_rank() -> int:
    """Return the global rank, or 0 if RANK is not set or not a valid number."""
    text = os.environ.get("RANK", "0")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def check_launched() -> None:
    """Raise ConfigError if a launcher variable is not a valid number, rank or port."""
    given = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    problems = [
        f"the environment variable {name} must be a whole number, got {text!r:.40}"
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


def fail(error: object, *, code: int, same_on_all_ranks: bool = True) -> int:
    """Print an error, one line per problem, and return the exit code `code`.

    If the error is `same_on_all_ranks`, rank 0 prints it for all ranks. Other ranks first wait to
    be stopped by torchrun; a rank that is not stopped prints its error with its rank.
    """
    rank = own_rank()
    if rank > 0 and same_on_all_ranks:
        time.sleep(PATIENCE)  # torchrun stops all ranks when one ends
        place = f"rank {rank} (host {socket.gethostname()})"
        error = "\n".join(f"{place}: {line}" for line in str(error).splitlines())
    print_error(error)
    tell_torchrun(str(error))
    return code


def tell_torchrun(message: str) -> None:
    """Write the message to torchrun's error file, so that torchrun's final report contains it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    with contextlib.suppress(OSError):
        text = json.dumps({"message": message, "timestamp": str(int(time.time()))})
        Path(path).write_text(text, encoding="utf-8")


class Aid:
    """Context manager that catches an OSError, which ends the block but not the run.

    A warning is printed for the first of consecutive errors.
    """

    def __init__(self, what: str) -> None:
        """`what` is the first part of the warning."""
        self.what = what
        self._failed = False

    def __enter__(self) -> "Aid":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, OSError) and not self._failed:
            print(f"warning: {self.what}: {described(error)}; the run continues", flush=True)
        self._failed = isinstance(error, OSError)
        return self._failed
