"""Check that paths in a config are local and fully expanded. This module has no slow imports."""

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from models.section import Check

URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?=/)|hf:")
VARIABLE: Final = re.compile(r"\$(\w+)")


def local_path(key: str, path: str | None) -> "Check":
    """Check that `path` is null, or a local path that requires no expansion of `~` or `$NAME`.
    `key` is the config key that holds the path."""
    path = path or ""
    if URL.match(path):
        rule = (
            f"must be a local path, got {path!r:.80}: object stores and hubs are not supported; "
            "mount the store and use the path of the mounted folder, or copy the files"
        )
        return key, True, rule
    variable = VARIABLE.search(path)
    name = "HOME" if path.startswith("~") else variable[1] if variable else None
    rule = (
        f"must not start with ~ or contain $NAME, got {path!r:.80}: ~ and $NAME are not expanded; "
        f"write '${{oc.env:{name}}}' for the variable's value"
    )
    return key, name is not None, rule
