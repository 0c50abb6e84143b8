"""Errors of a user's input, which entry points print as `error: ...` and end on with code 2."""

import os
import sys
import time


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


def fail(error: object, *, code: int, same_on_all_ranks: bool = True) -> int:
    """Print an error, one line per problem, and return the exit code `code`.

    Rank 0 speaks for all ranks if the error is `same_on_all_ranks`.
    """
    if int(os.environ.get("RANK", "0")) == 0 or not same_on_all_ranks:
        print_error(error)
    else:
        # torchrun stops all ranks when one ends: give rank 0 time to print.
        time.sleep(2)
    return code
