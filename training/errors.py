"""Errors that the user caused: entry points print them as `error: ...` and exit with code 2."""

import sys


class InputError(ValueError):
    """An input that cannot be used. The message names the input, the rule and the value."""


class ConfigError(InputError):
    """A run config that is unreadable, incomplete or contradictory."""


class DataError(InputError):
    """Training data or a tokenizer that is missing, corrupt or does not fit the run."""


class BrokenCheckpointError(InputError):
    """A checkpoint that is incomplete, or not as it was written."""


def print_error(error: object) -> None:
    """Print `error: ...` for each line of an error, as every entry point does."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
