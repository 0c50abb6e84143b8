"""Self-contained HTML pages, which need no network."""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from scripts.plots.run_figures import RunFigure
from scripts.plots.run_status import RunStatus
from scripts.plots.style import enlarge_text, mark_single_points
from training.errors import printable

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class PageSection:
    """A part of a page: its id, its heading, the sentence below, and the content.

    kind  type of content: figure, reason, runs, samples, data, events or config
    half  whether two such sections share a row where there is room
    menu  whether the menu at the top names it
    """

    name: str
    title: str
    about: str
    kind: str
    content: object
    half: bool = False
    menu: bool = True


def page(
    title: str,
    subtitle: str,
    *,
    status: RunStatus | None = None,
    cards: Iterable[tuple[str, str]] = (),
    sections: Sequence[PageSection],
) -> str:
    """Return the text of a page; `cards` are names and values."""
    text = TEMPLATES.get_template("page.html").render(
        title=title, subtitle=subtitle, status=status, cards=cards, sections=sections
    )
    return printable(text)


def figure_sections(
    figures: Iterable[tuple[RunFigure, Figure | None]], more: str = ""
) -> list[PageSection]:
    """Return a section for each figure with data; `more` follows the figure's sentence."""
    return [
        PageSection(
            kind.name, kind.title, kind.about + more, "figure", drawn(figure, kind.name), kind.half
        )
        for kind, figure in figures
        if figure is not None
    ]


def drawn(figure: Figure, key: str) -> str:
    """Return the figure as an SVG element whose ids occur in no other figure."""
    enlarge_text(figure)
    mark_single_points(figure)
    for background in (figure.patch, *(axis.patch for axis in figure.axes)):
        background.set(facecolor="none", edgecolor="none")
    buffer, dpi = io.StringIO(), figure.dpi
    # savefig would draw the figure twice, the second time for its layout.
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    figure.dpi = dpi  # the property was set for SVG
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'href="#', f'href="#{key}-', text)
    # The figure is at most its own size, and narrower on a narrow page.
    return re.sub(r'<svg ([^>]*?)height="([\d.]+)pt"', r"<svg \1", text, count=1)
