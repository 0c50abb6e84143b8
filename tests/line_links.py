"""Line numbers in links from pages to a `reference`. `python -m tests.line_links README.md` prints
the page with up-to-date line numbers."""

import re
import sys

from tests.paths import ROOT

LINK = re.compile(r"(spectral/[\w/]+\.py)#L\d+-L\d+")


def with_lines(text: str) -> str:
    """Update the line numbers in a page's links to `reference`, which ends each file."""
    return LINK.sub(_lines, text)


def _lines(link: re.Match[str]) -> str:
    lines = (ROOT / link[1]).read_text().splitlines()
    (first,) = (i for i, line in enumerate(lines, 1) if line.startswith("def reference("))
    return f"{link[1]}#L{first}-L{len(lines)}"


if __name__ == "__main__":
    sys.stdout.write(with_lines((ROOT / sys.argv[1]).read_text()))
