"""A self-contained HTML page about a run: its config, its progress and its figures."""

import html
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from scripts.plots.figures import FIGURES
from scripts.plots.run_data import Line, RunData
from training.report.metrics import duration

PAGE = Path(__file__).with_name("report.html")

SUMMARY = (
    ("model", ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab_size")),
    ("train", ("steps", "global_batch", "sequence_length", "precision")),
    ("schedule", ("kind", "warmup_steps", "min_ratio")),
    ("parallel", ("tensor", "pipeline", "expert", "context")),
)
"""Keys of the config on the page, by section."""


ALARMS = ("warning", "skipped", "rewind", "failed")
"""Kinds of events that stand out on the page."""


def report(run: RunData) -> str:
    """The page, which holds everything it shows and needs no network."""
    drawn = [(each, each.draw(run)) for each in FIGURES]
    shown = [(each, inline(figure, each.name)) for each, figure in drawn if figure is not None]
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escaped(run.config["run"]["name"]),
        subtitle=escaped(subtitle(run)),
        state=state(run),
        navigation="".join(
            f'<a href="#{each.name}">{escaped(each.title)}</a>' for each, _ in shown
        ),
        cards="".join(card(name, value) for name, value in key_figures(run)),
        figures="".join(
            f'<section id="{each.name}"{layout(each.name)}><h2>{escaped(each.title)}</h2>'
            f'<p>{escaped(each.about)}</p><div class="figure">{svg}</div></section>'
            for each, svg in shown
        ),
        events=events(run),
        config=config_tables(run.config),
    )


def write_report(run: RunData, path: Path) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(run), encoding="utf-8")


def layout(name: str) -> str:
    """The attribute of a section that puts two of its kind side by side, or nothing."""
    return ' class="half"' if name in ("learning_rates", "gradient_norm") else ""


def subtitle(run: RunData) -> str:
    """One line about the model and the rule of its matrices."""
    model, matrix = run.config["model"], run.config["optimizer"]["matrix"]
    pc = run.config.get("pc")
    layers = f"{model['family']}, {model['layers']} layers of width {model['hidden']}"
    extra = f", PC layers of level {pc['level']}" if pc else ""
    return f"{layers}; {matrix['rule']} at {matrix['lr']:g}{extra}"


def state(run: RunData) -> str:
    """A coloured badge: done, failed, or the step."""
    steps, step = run.config["train"]["steps"], run.metrics[-1]["step"]
    kind, text = "open", f"step {step:,} of {steps:,}"
    if (run.folder / "DONE").exists():
        kind, text = "done", f"done, {step:,} steps"
    elif run.events and run.events[-1].get("kind") == "failed":
        kind, text = "failed", f"failed after {text}"
    return f'<span class="state {kind}">{text}</span>'


def key_figures(run: RunData) -> Iterator[tuple[str, str]]:
    """Name and value of each card."""
    loss = run.series("train/loss")
    validation = run.series("val/loss")
    rate = [value for _, value in run.series("perf/tokens_per_sec")]
    if loss:
        yield "training loss", f"{loss[-1][1]:.4f}"
    if validation:
        yield "validation loss", f"{validation[-1][1]:.4f}"
        best = min(value for _, value in validation)
        if best < validation[-1][1]:
            yield "best validation", f"{best:.4f}"
    yield "tokens", compact(run.tokens(run.metrics[-1]))
    if rate:
        yield "tokens / second", compact(sorted(rate)[len(rate) // 2])
    yield "time of stepping", duration(run.seconds()(run.metrics[-1]))
    for metric, name in (("perf/mfu", "MFU"), ("moe/max_vio", "MaxVio")):
        if run.series(metric):
            value = run.series(metric)[-1][1]
            yield name, f"{value:.1f}%" if name == "MFU" else f"{value:.2f}"
    skipped = run.series("optim/skipped_steps")
    yield "skipped steps", f"{skipped[-1][1]:.0f}" if skipped else "0"


def compact(number: float) -> str:
    """Format a number with three digits and k, M, G or T."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def card(name: str, value: str) -> str:
    """One card."""
    return f'<div class="card"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>'


def happenings(run: RunData) -> Iterator[tuple[str, str, str, str]]:
    """Time, step, kind and text of each event, and of skipped steps."""
    skipped = 0
    found = [(each["step"], each["time"], each["kind"], said(each)) for each in run.events]
    for line in run.metrics:
        now = int(line.get("optim/skipped_steps", skipped))
        if now > skipped:
            text = (
                f"{now - skipped} steps skipped: their loss or gradient was not finite or a spike"
            )
            found.append((line["step"], "", "skipped", text))
        skipped = now
    for step, time, kind, text in sorted(found, key=lambda each: each[0]):
        yield time.replace("T", " ").replace("+00:00", " UTC"), f"{step:,}", kind, text


def said(event: Line) -> str:
    """Return the text of an event, with kind, rank and host of the error if it is a failure."""
    if "error" not in event:
        return str(event["text"])
    return f"{event['error']} on rank {event['rank']} (host {event['host']}): {event['text']}"


def events(run: RunData) -> str:
    """The table of events."""
    rows = [
        f'<tr class="{"alarm" if kind in ALARMS else ""}">'
        f"<td>{escaped(step)}</td><td>{escaped(kind)}</td><td>{escaped(text)}</td>"
        f"<td>{escaped(time)}</td></tr>"
        for time, step, kind, text in happenings(run)
    ]
    if not rows:
        return "<p>Nothing is on record.</p>"
    head = "<tr><th>step</th><th>what</th><th></th><th>when</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def config_tables(config: dict[str, Any]) -> str:
    """Tables of the most important keys of the config, and of the optimizer's groups."""
    tables = [table(name, [(key, config[name].get(key)) for key in keys]) for name, keys in SUMMARY]
    groups = [
        (name, "{rule}, lr {lr:g}, decay {weight_decay:g}".format(**config["optimizer"][name]))
        for name in ("matrix", "embedding", "head", "scalar")
    ]
    tables.append(table("optimizer", groups))
    data = [(name, each["path"]) for name, each in config["data"]["train"].items()]
    tables.append(table("data", data))
    for name in ("pc", "gram_penalty"):
        if config.get(name):
            tables.append(table(name, simple(config[name])))
    return "".join(tables)


def simple(section: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys and values of a section, without its subsections."""
    return [(key, value) for key, value in section.items() if not isinstance(value, dict)]


def table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    """A small table of keys and values that are not null."""
    lines = [
        f"<tr><th>{escaped(key)}</th><td>{escaped(value)}</td></tr>"
        for key, value in rows
        if value is not None
    ]
    return f"<div><h3>{escaped(title)}</h3><table>{''.join(lines)}</table></div>"


def escaped(value: object) -> str:
    """Escape `value` for HTML."""
    return html.escape(str(value))


def inline(figure: Figure, key: str) -> str:
    """The figure as an SVG element whose ids differ from those of other figures."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'href="#', f'href="#{key}-', text)
    # At most its own size, narrower where the page is.
    return re.sub(r'<svg ([^>]*?)height="([\d.]+)pt"', r"<svg \1", text, count=1)
