"""How Chromium shows a page: pictures of it, and the sizes of its text."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HEIGHT = 12_000
"""Pixels of a window's height, in which pages fit."""

# Chromium's own windows are at least 500 pixels wide, a frame in one is as narrow as a phone.
FRAME = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0 }}</style>
<iframe style="border: 0; width: {width}px; height: {height}px" srcdoc="{page}"></iframe>
<pre></pre><script>
document.querySelector("iframe").addEventListener("load", event => {{
  const view = event.target.contentWindow, page = view.document;
  const texts = [], wide = [];
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {{
    const owner = node.parentElement;
    if (!node.data.trim() || !owner.getClientRects().length) continue;
    let size = parseFloat(view.getComputedStyle(owner).fontSize);
    if (owner.ownerSVGElement) {{
      const matrix = owner.getScreenCTM();
      size *= Math.hypot(matrix.a, matrix.b);
    }}
    texts.push([size, node.data.trim()]);
  }}
  for (const each of page.body.querySelectorAll("*")) {{
    const box = each.getBoundingClientRect();
    if (box.width && box.right > view.innerWidth + 1 && !each.ownerSVGElement)
      wide.push(each.tagName + " " + each.id);
  }}
  document.querySelector("pre").textContent = JSON.stringify({{
    texts, wide, width: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight }});
}});
</script>"""


@dataclass(frozen=True)
class Shown:
    """A page as a browser shows it.

    texts    (size in pixels, text) of every visible text
    wide     elements that reach beyond the right edge
    width    of what can be scrolled to, in pixels; the window's if nothing is hidden
    height   of the whole page
    """

    texts: list[tuple[float, str]]
    wide: list[str]
    width: int
    height: int


def show(page: str, width: int, folder: Path, picture: Path) -> Shown:
    """Show a page in a window of `width` pixels, and save a picture of all of it."""
    assert BROWSER is not None
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width, height=HEIGHT, page=html.escape(page)))
    common = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--window-size={max(width, 500)},{HEIGHT}", f"--user-data-dir={folder}/profile",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]  # fmt: skip
    found = []
    for extra in ("--dump-dom", f"--screenshot={picture}"):
        done = subprocess.run(
            [*common, extra, frame.as_uri()], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    match = re.search(r"<pre>(.*?)</pre>", found[0], re.DOTALL)
    assert match is not None
    facts = json.loads(html.unescape(match[1]))
    with Image.open(picture) as image:
        image.crop((0, 0, width, min(HEIGHT, facts["height"]))).save(picture)
    return Shown(
        [(size, text) for size, text in facts["texts"]],
        facts["wide"],
        facts["width"],
        facts["height"],
    )
