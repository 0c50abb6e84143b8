"""Argument, error and exit-code handling shared by all scripts."""

import argparse
import functools
import io
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec

from parallel.disk import replace_file
from parallel.error_text import os_error_text
from training.checkpoint import COMPLETE
from training.command_line import Parser, fail
from training.errors import InputError
from training.json_file import real_path
from training.local_path import local_path

P = ParamSpec("P")


def new_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser that takes its description from the first line of a script's docstring.

    The description is empty under `python -OO`, which strips docstrings.
    """
    return Parser(description=(docstring or "").partition("\n")[0])


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and the positional `key=value` overrides, as in pretrain.py.

    Call `parse_intermixed_args` to allow options after the overrides.
    """
    parser.add_argument("--config", type=Path, required=True, help="run config (YAML file)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides")


def warn(text: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {text}", file=sys.stderr)


def warn_replaced(overrides: Sequence[str]) -> None:
    """Warn about each override that is replaced by a later one, as pretrain.py does."""
    from training.config.yaml_files import replaced  # deferred: slow import

    for text in replaced(overrides):
        warn(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json FILE`, which writes the results to a JSON file."""
    parser.add_argument("--json", type=output_path, help="also write all results to this JSON file")


def check_free(target: Path) -> None:
    """Raise InputError if `target` exists, or if it is inside a checkpoint that a run may
    remove."""
    if target.exists() or target.is_symlink():
        raise InputError(f"target {target} already exists; choose another folder")
    for parent in real_path(target).parents:
        if (parent / COMPLETE).is_file():
            raise InputError(f"target {target} must not be inside a checkpoint, got {parent}")


def whole_number(least: int = 1, most: int = 10**9) -> Callable[[str], int]:
    """Return an argparse type for integers from `least` to `most`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} to {most}, got {text!r:.40}"
            )
        return int(text)

    return parse


def output_path(text: str) -> Path:
    """Argparse type that parses an output path.

    Raises argparse.ArgumentTypeError for URLs, and for paths with a quoted ~ or variable, which the
    shell does not expand.
    """
    _, wrong, rule = local_path("", text)
    if wrong:
        raise argparse.ArgumentTypeError(rule.partition("; write")[0])
    return Path(text)


def token_count(text: str) -> int:
    """Parse a token count such as 1000000, 1_000_000, 1e6, 1M or 0.001B.

    Raises argparse.ArgumentTypeError if `text` is not an integer from 1 to 1e14.
    """
    match = re.fullmatch(
        r"(\d[\d_]{0,18}(?:\.\d{1,18})?(?:e\+?\d{1,2})?)([kmbt]?)", text, re.IGNORECASE
    )
    value = Decimal(match[1]) * 1000 ** " kmbt".index(match[2].lower() or " ") if match else None
    if value is None or not 1 <= value <= 10**14 or value % 1:
        raise argparse.ArgumentTypeError(
            "must be an integer from 1 to 1e14, such as 10000000000, 10_000_000_000, 1e10 or "
            f"10B, got {text!r:.40}"
        )
    return int(value)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, as in `1 document` or `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, so that readers see either the old text or the new one in full.

    Safe to call from several processes at once. Raises InputError if `path` is a folder.
    """
    if path.is_dir():
        raise InputError(f"the output must be a file, got the folder {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    replace_file(new, text)
    os.replace(new, path)


def require(module: str) -> None:
    """Raise InputError if the optional package `module` is not installed."""
    if find_spec(module) is None:
        raise InputError(f"{module} is not installed: pip install {module}")


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Wrap `main` to report user errors on stderr and return an exit code.

    `main` returns 0 on success, and 1 if a check or a run failed. If `main` raises InputError,
    OSError or EngineError, the command prints `error: ...` and returns 2. If `main` raises
    CollectiveError or MemoryError, the command prints `error: ...` and returns 1. Ctrl-C returns
    130. Any other exception is a bug, and its traceback is printed. Characters that stdout or
    stderr cannot encode are escaped.
    """

    @functools.wraps(main)
    def checked(*args: P.args, **kwargs: P.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # notebook streams have no reconfigure
                stream.reconfigure(errors="backslashreplace")
        try:
            return main(*args, **kwargs)
        except InputError as error:
            return fail(error, code=2)
        except OSError as error:
            return fail(os_error_text(error), code=2)
        except MemoryError as error:
            return fail(f"out of memory: {error}", code=1)
        except RuntimeError as error:
            from models.engine import EngineError  # deferred: imports torch
            from parallel.comm.collectives import CollectiveError

            if not isinstance(error, EngineError | CollectiveError):
                raise
            return fail(error, code=2 if isinstance(error, EngineError) else 1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return checked
