"""The text of an error in one line."""


def described(error: OSError, place: object = None) -> str:
    """Return the reason of an OSError and its file, or `place` if it names no file."""
    where = error.filename or place
    return f"{error.strerror or str(error) or type(error).__name__}" + (
        f": {where}" if where else ""
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if there is no message.

    If the line ends in a colon, the next line is added.
    """
    line, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{line} {rest[0].strip()}" if rest and line.endswith(":") else line


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or the error's type if there is no message.

    In an error of a worker process, the last line is the actual error.
    """
    return (str(error).strip() or repr(error)).splitlines()[-1]
