"""One-line error messages."""


def os_error_text(error: OSError, fallback: object = None) -> str:
    """Return the reason for an OSError, followed by its file name or, if the error names no file,
    by `fallback`."""
    where = error.filename or fallback
    return f"{error.strerror or str(error) or type(error).__name__}" + (
        f": {where}" if where else ""
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the error type if the message is empty.

    If the first line ends with a colon, the second line is appended.
    """
    line, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{line} {rest[0].strip()}" if rest and line.endswith(":") else line


def last_line(error: BaseException) -> str:
    """Return the last line of an error message, or the error's repr if the message is empty.

    For an error raised in a worker process, the last line is the original error.
    """
    return (str(error).strip() or repr(error)).splitlines()[-1]
