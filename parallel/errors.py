"""What an error of the operating system says."""


def described(error: OSError, place: object = None) -> str:
    """Return what went wrong, and with which file: the system's, or else `place`."""
    where = error.filename or place
    return f"{error.strerror or str(error) or type(error).__name__}" + (
        f": {where}" if where else ""
    )
