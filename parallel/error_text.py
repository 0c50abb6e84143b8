"""The text of an error in one line."""


def described(error: OSError, place: object = None) -> str:
    """Return what went wrong, and with which file: the system's, or else `place`."""
    where = error.filename or place
    return f"{error.strerror or str(error) or type(error).__name__}" + (
        f": {where}" if where else ""
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the next one if it ends in a colon; of an
    error without a message its type."""
    line, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{line} {rest[0].strip()}" if rest and line.endswith(":") else line


def last_line(error: BaseException) -> str:
    """Return the last line of what an error says, which of a worker's is the error itself; of one
    that says nothing its name."""
    return (str(error).strip() or repr(error)).splitlines()[-1]
