"""The frame of a self-contained HTML page: it holds everything it shows and needs no network."""

import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from scripts.plots.style import enlarge_text, stack

PAGE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class PageSection:
    """A part of a page: its id, heading, the sentence below it, and its HTML.

    half  whether two such sections share a row where there is room
    menu  whether the menu at the top names it
    """

    name: str
    title: str
    about: str
    body: str
    half: bool = False
    menu: bool = True

    def __str__(self) -> str:
        kind = ' class="half"' if self.half else ""
        about = f"<p>{escaped(self.about)}</p>" if self.about else ""
        return (
            f'<section id="{self.name}"{kind}><h2>{escaped(self.title)}</h2>{about}'
            f"{self.body}</section>"
        )


def page(
    title: str,
    subtitle: str,
    *,
    state: str = "",
    cards: Iterable[tuple[str, str]] = (),
    sections: Sequence[PageSection],
) -> str:
    """Return the text of a page; `state` is HTML, `cards` are names and values."""
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escaped(title),
        subtitle=escaped(subtitle),
        state=state,
        cards="".join(
            f'<div class="card"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>'
            for name, value in cards
        ),
        navigation="".join(
            f'<a href="#{each.name}">{escaped(each.title)}</a>' for each in sections if each.menu
        ),
        sections="\n".join(str(each) for each in sections),
    )


def badge(kind: str, text: str) -> str:
    """Return the coloured badge of a run's status, whose kind is its colour."""
    return f'<span class="state {kind}">{escaped(text)}</span>'


def drawn(figure: Figure, name: str) -> str:
    """Return a figure twice: for wide pages, and with its panels stacked for phones."""
    enlarge_text(figure)
    wide = inline(figure, name)
    stack(figure)
    return (
        f'<div class="figure wide-figure">{wide}</div>'
        f'<div class="figure narrow-figure">{inline(figure, f"{name}-narrow")}</div>'
    )


def inline(figure: Figure, key: str) -> str:
    """Return the figure as an SVG element whose ids differ from those of other figures."""
    for background in (figure.patch, *(axis.patch for axis in figure.axes)):
        background.set(facecolor="none", edgecolor="none")
    buffer, dpi = io.StringIO(), figure.dpi
    # savefig would draw it twice: once more for its layout, which drawing finds itself.
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    figure.dpi = dpi  # which was set to that of SVG
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'href="#', f'href="#{key}-', text)
    # At most its own size, narrower where the page is.
    return re.sub(r'<svg ([^>]*?)height="([\d.]+)pt"', r"<svg \1", text, count=1)


def escaped(value: object) -> str:
    """Return `value` escaped for HTML."""
    return html.escape(str(value))
