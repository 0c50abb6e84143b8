"""Errors in a user's input, and errors of optional files. Commands print the former as `error: ...`
and exit with code 2. The latter do not end a run.
"""

import contextlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Final

from parallel.error_text import described


class InputError(ValueError):
    """Error for an invalid input. The message names the input, the rule and the value."""


class ConfigError(InputError):
    """Error for a run config that is unreadable, incomplete or contradictory."""


class DataError(InputError):
    """Error for data or a tokenizer that is missing, corrupt or unsuitable for the run."""


class MissingSetError(DataError):
    """Error for a set without files. `key` is the config key, outermost first, if known."""

    def __init__(self, message: str, key: tuple[str, str, str] | None = None) -> None:
        super().__init__(message)
        self.key = key


class VocabularyError(DataError):
    """Error for a vocabulary size that does not match the data."""


class BrokenCheckpointError(InputError):
    """Error for a checkpoint that is incomplete or has changed since it was written."""


_COMMANDS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Replace characters that control a terminal or a page with U+FFFD.

    These are control characters except line breaks and tabs, lone surrogates (which UTF-8 cannot
    encode), and characters that change the text direction.
    """
    return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def near_name(path: Path) -> str:
    """Return `; did you mean PATH?` for a missing path, or '' if it exists or no name is close.

    PATH is the path with the closest name among files with the same suffix in the same folder.
    """
    from models.section import closest  # imports pydantic

    near = None
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            names = map(Path, os.listdir(path.parent))
            near = closest(path.stem, [n.stem for n in names if n.suffix == path.suffix])
    return "" if near is None else f"; did you mean {path.with_name(near + path.suffix)}?"


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
