"""mkdocs hooks for `make site`."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(?<!!)\[([^]]*)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to files outside docs/ with the link text and the file path.

    Raises FileNotFoundError if a linked file does not exist.
    """
    return OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    """Return the text that replaces a link."""
    text, path = link.groups()
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which does not exist")
    return f"{text} (`{path}`)"
