"""Hooks of mkdocs for `make site`: what differs between the pages in the checkout and the site."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(?<!!)\[([^]]*)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Name files of the checkout, which the site does not have, instead of links to them.

    Raises FileNotFoundError for a link to a file that does not exist.
    """
    return OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    """Return the text of a link and the file that it leads to."""
    text, path = link.groups()
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which does not exist")
    return f"{text} (`{path}`)"
