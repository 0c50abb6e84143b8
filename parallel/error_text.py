"""One-line texts of errors."""


def described(error: OSError, place: object = None) -> str:
    """Return an OSError's reason, followed by its file or, if it names no file, by `place`."""
    where = error.filename or place
    return f"{error.strerror or str(error) or type(error).__name__}" + (
        f": {where}" if where else ""
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if there is no message.

    If the first line ends in a colon, the second line is appended.
    """
    line, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{line} {rest[0].strip()}" if rest and line.endswith(":") else line


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or the error's type if there is no message.

    The last line of an error from a worker process contains the original error.
    """
    return (str(error).strip() or repr(error)).splitlines()[-1]
