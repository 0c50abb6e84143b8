"""Errors in user input, and failures to write optional files. If input is invalid, commands print
`error: ...` and exit with code 2. A failure to write an optional file does not end a run.
"""

import contextlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Final

from parallel.error_text import os_error_text

TOKEN_FILES: Final = (
    "to use nanoGPT's .bin or .npy token files, index them with the script in docs/data.md under "
    "'Token files without an index'"
)
"""Advice for token files that are given in place of text or of an indexed dataset."""


class InputError(ValueError):
    """Raised for invalid input. The message names the input, and states the rule and the value that
    violates it."""


class ConfigError(InputError):
    """Raised if a run config is unreadable, incomplete or contradictory."""


class DataError(InputError):
    """Raised if data or a tokenizer is missing, corrupt or unsuitable for the run."""


class MissingSetError(DataError):
    """Raised if files of a token set are missing. `key` is the set's config key as a tuple of
    names, outermost first, or None if it is unknown."""

    def __init__(self, message: str, key: tuple[str, str, str] | None = None) -> None:
        super().__init__(message)
        self.key = key


class VocabularyError(DataError):
    """Raised if the vocabulary size does not match the data."""


class ProgressError(DataError):
    """Raised if an interrupted data preparation cannot be resumed and must start over."""


class BrokenCheckpointError(InputError):
    """Raised if a checkpoint is incomplete or has changed since it was written."""


_COMMANDS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Replace characters that could affect a terminal or page with U+FFFD.

    The replaced characters are control characters other than line breaks and tabs, lone surrogates
    (which cannot be encoded in UTF-8), and characters that change the text direction.
    """
    return _COMMANDS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def near_name(path: Path) -> str:
    """Return `; did you mean PATH?` if `path` is missing. Return '' if `path` exists, or if there
    is no similar name.

    PATH is the file with the most similar name among all files with the same suffix in the same
    folder.
    """
    from models.section import closest  # imports pydantic

    near = None
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            names = map(Path, os.listdir(path.parent))
            near = closest(path.stem, [n.stem for n in names if n.suffix == path.suffix])
    return "" if near is None else f"; did you mean {path.with_name(near + path.suffix)}?"


class Aid:
    """Context manager that suppresses an OSError: the error ends the block, but not the run.

    If consecutive uses fail, only the first failure prints a warning.
    """

    def __init__(self, what: str) -> None:
        """`what` is the prefix of the warning."""
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
            print(f"warning: {self.what}: {os_error_text(error)}; the run continues", flush=True)
        self._failed = isinstance(error, OSError)
        return self._failed
