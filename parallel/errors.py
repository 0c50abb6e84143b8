"""What errors say, in a line."""


def described(error: OSError, place: object = None) -> str:
    """Return what went wrong, and with which file: the system's, or else `place`."""
    where = error.filename or place
    return f"{error.strerror or str(error) or type(error).__name__}" + (
        f": {where}" if where else ""
    )


def last_line(error: BaseException) -> str:
    """Return the last line of what an error says, which of a worker's is the error itself; of one
    that says nothing its name."""
    return (str(error).strip() or repr(error)).splitlines()[-1]
