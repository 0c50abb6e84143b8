"""Paths that a user names: places of this machine's file system, written out."""

import re
from typing import Final

from models.section import Check

URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?=/)|hf:")
VARIABLE: Final = re.compile(r"\$(\w+)")


def local_path(key: str, path: str | None) -> Check:
    """Check that the path in `key`, which may be null, is local and needs no expansion."""
    path = path or ""
    if URL.match(path):
        rule = (
            "must be a local path, as no object store or hub is read or written: mount the store "
            "and name the folder there, or copy the files"
        )
        return key, True, rule
    variable = VARIABLE.search(path)
    name = "HOME" if path.startswith("~") else variable[1] if variable else None
    rule = f"must be written out, as no ~ or $NAME is expanded: '${{oc.env:{name}}}' is the value"
    return key, name is not None, rule
