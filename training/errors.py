"""Errors of a user's input, which entry points print as `error: ...` and end on with code 2."""

import sys


class InputError(ValueError):
    """An input that cannot be used. The message names the input, the rule and the value."""


class ConfigError(InputError):
    """A run config that is unreadable, incomplete or contradictory."""


class DataError(InputError):
    """Training data or a tokenizer that is missing, corrupt or unfit for the run."""


class BrokenCheckpointError(InputError):
    """A checkpoint that is incomplete or has changed since it was written."""


def print_error(error: object) -> None:
    """Print each line of an error as `error: ...` on stderr."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
