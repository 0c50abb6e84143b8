"""mkdocs hooks of `make site`."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(?<!!)\[([^]]*)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each link to a file outside docs/ with the link's text and the file's path.

    Raises FileNotFoundError for a link to a file that does not exist.
    """
    return OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    """Return the replacement of a link."""
    text, path = link.groups()
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which does not exist")
    return f"{text} (`{path}`)"
