"""The report page for a run, with its status, progress, figures, text samples, data and config.

Pages are self-contained HTML and work offline.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from scripts.plots.run_data import Line, RunData, RunStatus, run_status, spread
from scripts.plots.run_figures import FIGURES, RunFigure
from scripts.plots.style import enlarge_text, mark_single_points
from training.errors import InputError, printable
from training.json_file import check_shape, read_json
from training.report.text import duration, short

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class PageSection:
    """A section of a page.

    name     HTML id
    title    heading
    about    text below the heading
    kind     type of content: figure, reason, runs, samples, data, events or config
    content  data for the template, depending on `kind`
    half     whether the section takes up half the width on wide pages
    menu     whether the top menu links to the section
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
    """Return the HTML of a page. `cards` are (name, value) pairs to show at the top."""
    text = TEMPLATES.get_template("page.html").render(
        title=title, subtitle=subtitle, status=status, cards=cards, sections=sections
    )
    return printable(text)


def figure_sections(
    figures: Iterable[tuple[RunFigure, Figure | None]], more: str = ""
) -> list[PageSection]:
    """Return a section for each figure that is not None. `more` is appended to the captions."""
    return [
        PageSection(
            kind.name, kind.title, kind.about + more, "figure", drawn(figure, kind.name), kind.half
        )
        for kind, figure in figures
        if figure is not None
    ]


def drawn(figure: Figure, key: str) -> str:
    """Return the figure as an SVG element. The element's ids are prefixed with `key` to make them
    unique."""
    enlarge_text(figure)
    mark_single_points(figure)
    for background in (figure.patch, *(axis.patch for axis in figure.axes)):
        background.set(facecolor="none", edgecolor="none")
    buffer = io.StringIO()
    # savefig would draw the figure twice, the first time to compute the layout.
    FigureCanvasSVG(figure).print_svg(buffer)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    return re.sub(r'href="#', f'href="#{key}-', text)


SAMPLES = 6
"""Maximum number of steps to show text samples for, per dataset."""

ALARMS = ("warning", "skipped", "straggler", "rewind", "failed")
"""Kinds of events to highlight."""


def report(run: RunData) -> str:
    """Return the report page for a run."""
    status = run_status(run)
    sections = figure_sections((each, each.draw(run)) for each in FIGURES if run.metrics)
    if run.metrics and not run.monitors:
        sections.append(PageSection("spectra", "Spectra", no_spectra(run), "figure", ""))
    if status.reason:
        title = "Why it failed" if status.kind == "failed" else "Why it stopped"
        sections.insert(0, PageSection("status", title, "", "reason", status))
    texts = samples(run)
    if texts:
        about = "The first tokens of each dataset (grey), continued by greedy decoding."
        sections.append(PageSection("samples", "Text samples", about, "samples", texts))
    if (used := data_use(run)) is not None:
        about = "Each dataset's share of the samples, and its tokens and epochs over the whole run."
        sections.append(PageSection("data", "Data", about, "data", used))
    about = "Starts, stops, failures, warnings and skipped steps."
    sections.append(PageSection("events", "Events", about, "events", list(happenings(run))))
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    sections.append(PageSection("config", "Config", "", "config", text))
    return page(
        run.config["run"]["name"],
        subtitle(run),
        status=status,
        cards=key_figures(run),
        sections=sections,
    )


def no_spectra(run: RunData) -> str:
    """Return the reason why a run has no spectra yet."""
    intervals = [
        event["intervals"] for event in run.events if isinstance(event.get("intervals"), dict)
    ]
    interval = (
        intervals[-1].get("monitors") if intervals else run.config["monitors"].get("interval")
    )
    if interval == 0:
        return "Spectra are not computed, because monitors.interval is 0."
    at = f"step {interval:,}" if isinstance(interval, int) else "the first monitored step"
    return f"Spectra are not available yet: monitoring starts at {at}."


def subtitle(run: RunData) -> str:
    """Describe the model and its matrix update rule in one line."""
    model, matrix = run.config["model"], run.config["optimizer"]["matrix"]
    pc = run.config.get("pc")
    layers = f"{model['family']}, {model['layers']} layers of width {model['hidden']}"
    extra = f", PC layers of level {pc['level']}" if pc else ""
    return f"{layers}; {matrix['rule']} at {matrix['lr']:g}{extra}"


def key_figures(run: RunData, measure: str = "val/loss") -> Iterator[tuple[str, str]]:
    """Yield the name and value of each card that the run has data for. `measure` is the validation
    metric."""
    loss, validation = run.last("train/loss"), run.last(measure)
    finite = [value for _, value in run.series(measure)]
    rate = [value for _, value in run.series("perf/tokens_per_sec")]
    if loss is not None:
        yield "training loss", _finite(loss)
    if validation is not None:
        step = max(line["step"] for line in run.metrics if measure in line)
        yield "validation loss", _finite(validation) + f" at step {step:,}" * (step < run.step)
    if finite:
        yield "best validation", f"{min(finite):.4f}"
    yield "tokens", short(run.tokens({"step": run.step}))
    if rate:
        yield "tokens / second", short(median(rate))
    if run.metrics:
        yield "training time", duration(run.seconds()(run.metrics[-1]))
    for metric, name, form in (
        ("perf/mfu", "MFU", ".1f"), ("moe/max_vio", "MaxVio", ".2f"),
        ("optim/skipped_steps", "skipped steps", ".0f"),
    ):  # fmt: skip
        if series := run.series(metric):
            yield name, f"{series[-1][1]:{form}}"


def _finite(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def samples(run: RunData) -> list[tuple[str, str, str, str]]:
    """Return (step, dataset, prompt, text) for a few text samples per dataset."""
    rows = []
    for name in (name for name in run.names("sample/") if name.endswith("/text")):
        lines = [line for line in run.metrics if isinstance(line.get(name), str)]
        for line in spread(lines, SAMPLES):
            prompt = line.get(name.removesuffix("text") + "prompt", "")
            rows.append((f"{line['step']:,}", name.split("/")[1], prompt, line[name]))
    return rows


def happenings(run: RunData) -> Iterator[dict[str, Any]]:
    """Yield events and skipped steps in order, as dicts with the keys used by the template."""
    rows = []
    for event in run.events:
        text = str(event["text"])
        if "error" in event:
            rank, host = event.get("rank"), event.get("host")
            text = f"{event['error']} on rank {rank} (host {host}): {text}"
        rows.append((event["step"], event["time"], event["kind"], text))
    skipped = 0
    for line in run.metrics:
        now = int(line.get("optim/skipped_steps", skipped))
        if now > skipped:
            text = (
                f"{now - skipped} steps skipped, because the loss or gradient was not finite or "
                "the loss spiked"
            )
            rows.append((line["step"], "", "skipped", text))
        skipped = now
    for step, time, kind, text in sorted(rows, key=lambda each: each[0]):
        shown = time.replace("T", " ").replace("+00:00", " UTC")
        alarm = kind in ALARMS
        yield {"time": shown, "step": f"{step:,}", "kind": kind, "text": text, "alarm": alarm}


SHAPE: Final = {
    "sets": [{"name": str, "tokens": int, "epochs": int | float, ...: str | int | float}],
    "phases": [{"after_steps": int, "shares": {...: int | float}}],
    ...: object,
}


def data_use(run: RunData) -> dict[str, Any] | None:
    """Return the header and rows of the dataset table.

    Returns None if data.json is missing or unreadable, or if an older version wrote data.json
    without the numbers in the table.
    """
    path = run.folder / "data.json"
    try:
        content = read_json(path)
        check_shape(content, SHAPE, str(path))
    except (OSError, ValueError, InputError):
        return None
    phases = content["phases"]
    counted = [
        line
        for line in run.metrics
        if any(key.startswith("data/") and key.endswith("/tokens") for key in line)
    ]
    last: Line = counted[-1] if counted else {}
    header = ["set", *(f"from step {phase['after_steps'] + 1:,}" for phase in phases)]
    header += ["tokens read"] * bool(last) + ["total tokens", "epochs"]
    rows = []
    for each in content["sets"]:
        name = each["name"]
        read = [f"{last.get(f'data/{name}/tokens', 0):,}"] if last else []
        shares = [f"{phase['shares'].get(name, 0):.1%}" for phase in phases]
        rows.append([name, *shares, *read, f"{each['tokens']:,}", f"{each['epochs']:.2f}"])
    return {"header": header, "rows": rows}
