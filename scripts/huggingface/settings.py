"""config.json of a model folder that may be of others."""

from pathlib import Path
from typing import Any, Final

from training.errors import InputError
from training.json_file import check_shape, read_json

ATTENTION: Final = (None, "eager", "sdpa")
"""Implementations of attention that transformers has itself; others it downloads and runs."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in config.json.

    Raises InputError if it cannot be read, or asks for attention by somebody else's code.
    """
    path = folder / "config.json"
    try:
        content: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    check_shape(content, {}, str(path))
    for key, value in content.items():
        if "attn_implementation" in key and value not in ATTENTION:
            raise InputError(f"{path}: {key} must be eager or sdpa, got {value!r:.60}")
    return content
