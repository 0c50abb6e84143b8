"""Checks of a document's text, and the first line of an error."""

from training.errors import DataError


def checked_text(value: object, where: str, key: str) -> str:
    """Return `value` if it is text that UTF-8 can encode.

    Raises:
        DataError: it is not a string, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be a string, got {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} is not Unicode text: {error.reason}") from None
    return value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
