"""Checks of a document's text."""

from collections.abc import Mapping

from training.errors import DataError


def row_text(row: object, where: str, key: str) -> str:
    """Return the value of `key` in a row if it is text that UTF-8 can encode.

    Raises:
        DataError: there is no such key, its value is not a string, or it holds half of a surrogate
            pair.
    """
    if not isinstance(row, Mapping) or key not in row:
        keys = ", ".join(row) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise DataError(
            f"{where}: no key {key!r}, found {keys or 'no keys'}; name the key that holds the text "
            "by --text-key KEY or NAME:KEY=INPUT"
        )
    value = row[key]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} must be a string, got {type(value).__name__}; mend or remove the row"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {key!r} is not Unicode text: {error.reason}; mend or remove the row"
        ) from None
    return value
