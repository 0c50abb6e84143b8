"""One self-contained HTML page about a run: what it is, how it went, and its figures."""

import html
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from scripts.plots import blocks, curves, spectra
from scripts.plots.run_data import RunData
from training.report.metrics import duration

PAGE = Path(__file__).with_name("report.html")

SUMMARY = (
    ("model", ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab_size")),
    ("train", ("steps", "global_batch", "sequence_length", "precision")),
    ("schedule", ("kind", "warmup_steps", "min_ratio")),
    ("parallel", ("tensor", "pipeline", "expert", "context")),
)
"""What of the config is on the page, by section."""

CONTENT: tuple[tuple[str, str, str], ...] = (
    ("loss", "Loss", "Nats per token on the training batches, and on the validation sets as dots."),
    ("lr", "Learning rates", "What the schedule makes of each group's peak."),
    ("gradient", "Gradient norm", "Of the whole gradient, before it is clipped."),
    ("evolution", "How the spectra moved", "Singular values of each role's matrices, mean over "
     "its units: the median, the middle 80% and all of them."),
    ("histograms", "Where the singular values lie", "At the last look, divided by the largest; "
     "of PC layers those of the weight that the model multiplies by."),
    ("condition", "Condition numbers", "Largest singular value over the mean of the smallest tenth "
     "of them: lower is better conditioned."),
    ("residual", "The residual stream", "Root mean square of its entries after each layer."),
    ("logits", "Attention logits", "The largest scaled score that the mask lets through: thick of "
     "all layers, thin of each."),
    ("signal", "Signal and noise", "Of gradients between the micro-batches of a step, of applied "
     "updates between the last steps: what they share over what they differ in, and the part of "
     "the difference in one direction, dotted its least. Alignment is the cosine with the step "
     "before."),
    ("stable_rank", "Stable rank of the weights", "Squared Frobenius over squared spectral norm, "
     "by layer and role."),
    ("criterion", "Spectral or elementwise?", "Nuclear rank of the gradient over stable rank of "
     "the incoming activations: above 1, red, the spectral update gains more."),
    ("maxvio", "Balance of the experts", "How far the fullest expert is above the mean load; 0 is "
     "balanced."),
    ("penalty", "Gram penalty", "The off-diagonal Gram penalty over the loss."),
)  # fmt: skip
"""Key, title and one sentence of each figure, in the order of the page."""


def figures(run: RunData) -> Iterator[tuple[str, Figure]]:
    """Key and figure of all that the run has data for."""
    one = [run]
    found = {
        "loss": curves.loss(one),
        "lr": curves.learning_rates(one),
        "gradient": curves.gradient_norm(one),
        "evolution": spectra.evolution(run),
        "histograms": spectra.histograms(one),
        "condition": curves.condition_numbers(one),
        "residual": blocks.residual(run),
        "logits": blocks.attention_logits(one),
        "signal": curves.signal(run),
        "stable_rank": spectra.unit_map(run, "stable_rank", "stable rank"),
        "criterion": spectra.criterion_map(run),
        "maxvio": curves.balance(one),
        "penalty": curves.penalty(one),
    }
    for key, _, _ in CONTENT:
        figure = found[key]
        if figure is not None:
            yield key, figure


def report(run: RunData) -> str:
    """The page. It holds everything it shows and asks no network for anything."""
    parts = {key: inline(figure, key) for key, figure in figures(run)}
    shown = [(key, title, about) for key, title, about in CONTENT if key in parts]
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escaped(run.config["run"]["name"]),
        subtitle=escaped(subtitle(run)),
        state=state(run),
        navigation="".join(f'<a href="#{key}">{escaped(title)}</a>' for key, title, _ in shown),
        cards="".join(card(name, value) for name, value in key_figures(run)),
        figures="".join(
            f'<section id="{key}"{layout(key)}><h2>{escaped(title)}</h2><p>{escaped(about)}</p>'
            f'<div class="figure">{parts[key]}</div></section>'
            for key, title, about in shown
        ),
        events=events(run),
        config=config_tables(run.config),
    )


def layout(key: str) -> str:
    """The attribute of a section that says that two of its kind stand side by side."""
    return ' class="half"' if key in ("lr", "gradient") else ""


def subtitle(run: RunData) -> str:
    """The model and how its matrices are trained, in a line."""
    model, matrix = run.config["model"], run.config["optimizer"]["matrix"]
    pc = run.config.get("pc")
    layers = f"{model['family']}, {model['layers']} layers of width {model['hidden']}"
    extra = f", PC layers of level {pc['level']}" if pc else ""
    return f"{layers}; {matrix['rule']} at {matrix['lr']:g}{extra}"


def state(run: RunData) -> str:
    """Whether the run is done, as a coloured word."""
    steps, step = run.config["train"]["steps"], run.metrics[-1]["step"]
    done = (run.folder / "DONE").exists()
    text = f"done, {step:,} steps" if done else f"step {step:,} of {steps:,}"
    return f'<span class="state {"done" if done else "open"}">{text}</span>'


def key_figures(run: RunData) -> Iterator[tuple[str, str]]:
    """Name and value of what is on the cards."""
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
    """A number in three digits with k, M, G or T."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def card(name: str, value: str) -> str:
    """One key figure."""
    return f'<div class="card"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>'


def happenings(run: RunData) -> Iterator[tuple[str, str, str, str]]:
    """When, after which step, what kind, and in words: the events, and steps that were skipped."""
    skipped = 0
    found = [(each["step"], each["time"], each["kind"], each["text"]) for each in run.events]
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


def events(run: RunData) -> str:
    """The table of what happened."""
    rows = [
        f'<tr class="{"alarm" if kind in ("warning", "skipped", "rewind") else ""}">'
        f"<td>{escaped(step)}</td><td>{escaped(kind)}</td><td>{escaped(text)}</td>"
        f"<td>{escaped(time)}</td></tr>"
        for time, step, kind, text in happenings(run)
    ]
    if not rows:
        return "<p>Nothing is on record.</p>"
    head = "<tr><th>step</th><th>what</th><th></th><th>when</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def config_tables(config: dict[str, Any]) -> str:
    """Tables of what matters most in the config, and the groups of the optimizer."""
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
    """The keys of a section that hold plain values."""
    return [(key, value) for key, value in section.items() if not isinstance(value, dict)]


def table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    """A small table of keys and values, without those that are null."""
    lines = [
        f"<tr><th>{escaped(key)}</th><td>{escaped(value)}</td></tr>"
        for key, value in rows
        if value is not None
    ]
    return f"<div><h3>{escaped(title)}</h3><table>{''.join(lines)}</table></div>"


def escaped(value: object) -> str:
    """`value` as text of a page."""
    return html.escape(str(value))


def inline(figure: Figure, key: str) -> str:
    """The figure as an SVG element, its names made different from those of other figures."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'href="#', f'href="#{key}-', text)
    # Of its own size at most, narrower where the page is.
    return re.sub(r'<svg ([^>]*?)height="([\d.]+)pt"', r"<svg \1", text, count=1)
