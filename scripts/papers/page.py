"""Generate the text and figures of docs/papers.md. The text comes from introduction.md, papers.yaml
and gpu_hours.json. Figures are drawn from committed results.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from scripts.papers.catalogue import Hours, Item, Paper, key_of
from scripts.papers.measured import ROOT, runs_of
from scripts.plots.style import COLORS, new_figure, new_grid
from training.json_file import read_json
from training.report.text import markdown_table

FOLDER: Final = Path("docs/images/papers")


def figure_file(paper: str, key: str) -> Path:
    """Return the path of a row's figure, relative to the project root."""
    return FOLDER / f"{paper}_{key}.svg"


def draw(item: Item) -> Figure:
    """Draw the committed series of a measured item. If there are no series, draw the losses of the
    item's study."""
    assert item.measure is not None and item.file is not None
    results = read_json(ROOT / item.file)
    if item.measure.series:
        figure = draw_series(results, item.measure.series)
    else:
        figure = draw_study(results)
    figure.suptitle(item.shows, fontsize=11, wrap=True)
    return figure


def draw_series(runs: Mapping[str, Any], described: Mapping[str, str]) -> Figure:
    """Draw a panel per series, with a line (or single point) per run and seed."""
    figure, panels = new_grid(len(described), columns=3, width=3.4, height=2.6)
    names = [name.replace("_", " ") for name in runs]
    for panel, (series, text) in zip(panels, described.items(), strict=True):
        panel.set_title(text.removeprefix("metric "), fontsize=9)
        points = False
        for i, (name, content) in enumerate(zip(names, runs.values(), strict=True)):
            for index, run in enumerate(runs_of(content).values()):
                values, label = run["series"][series], name if index == 0 else None
                points = len(values) == 1
                if points:
                    panel.plot([*values.values()], i, "o", color=f"C{i}", label=label)
                else:
                    steps = [int(step) for step in values]
                    panel.plot(steps, [*values.values()], color=f"C{i}", label=label)
        if points:
            panel.set_yticks(range(len(names)), names)
            panel.invert_yaxis()
        else:
            panel.set_xlabel("step")
    if len(names) > 1:
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 5))
    return figure


def draw_study(variants: Mapping[str, Any]) -> Figure:
    """Draw the validation losses of all variants: every seed, the mean and its standard error."""
    figure, (panel,) = new_figure(width=6.0, height=1.2 + 0.34 * len(variants))
    rows = [*variants.values()][::-1]
    for i, variant in enumerate(rows):
        losses, color = variant["losses"], COLORS[variant["against"] is not None]
        panel.plot(losses, [i] * len(losses), "o", color=color, alpha=0.35, markersize=4)
        panel.errorbar(variant["loss"], i, xerr=variant["error"], fmt="D", color=color, capsize=3)
    panel.set_yticks(range(len(rows)), [variant["variant"] for variant in rows])
    panel.set_xlabel("validation loss (nats per token)")
    return figure


HEADINGS = ("", "shows", "our result", "status", "full, GPU-hours")
INTRODUCTION = Path(__file__).with_name("introduction.md").read_text(encoding="utf-8")
DIAGRAM = "A diagram."


def page(papers: Mapping[str, Paper], hours: Mapping[str, Hours]) -> str:
    """Return the text of docs/papers.md."""
    counts = Counter(item.status for paper in papers.values() for item in paper.items.values())
    listed = ", ".join(f"{status} {count}" for status, count in counts.most_common())
    parts = [INTRODUCTION, f"Items by status: {listed} ({counts.total()} in total).\n"]
    for name, paper in papers.items():
        lines = [
            line(name, key, item, hours) for key, item in paper.items.items() if item.why != DIAGRAM
        ]
        diagrams = [spaced(key) for key, item in paper.items.items() if item.why == DIAGRAM]
        notes = [paper.note, f"Diagrams: {', '.join(diagrams)}." if diagrams else None]
        note = " ".join(filter(None, notes))
        parts.append(f'\n## {name}: "{paper.title}"\n\n')
        parts.append(f"{note}\n\n" if note else "")
        parts.append(markdown_table(HEADINGS, lines))
    return "".join(parts)


def line(paper: str, key: str, item: Item, hours: Mapping[str, Hours]) -> tuple[str, ...]:
    """Return an item's table row."""
    result = item.result or ""
    if item.file is not None and result:
        links = f"[{'test' if item.file.endswith('.py') else 'data'}](../{item.file})"
        if item.measure is not None:
            links += f", [figure](../{figure_file(paper, key).as_posix()})"
        result += f" ({links})"
    return (
        spaced(key),
        item.shows,
        ". ".join(part for part in (result, item.why) if part),
        item.status,
        shown([hours[key_of(run)] for run in item.full]),
    )


def spaced(key: str) -> str:
    """Return an item's name with spaces instead of underscores."""
    return key.replace("_", " ")


def shown(runs: Sequence[Hours]) -> str:
    """Format the total GPU-hours of runs and their largest GPU count. Return an empty string if
    there are no runs."""
    if not runs:
        return ""
    return f"{sum(run['gpu_hours'] for run in runs):,.0f} on {max(run['gpus'] for run in runs)}"
