"""docs/papers.md, written from introduction.md, papers.yaml and gpu_hours.json alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.papers.catalogue import Item, Paper, Status
from scripts.papers.figure import figure_file
from scripts.papers.gpu_hours import Hours, key_of
from training.report.table import markdown_table

HEADINGS = ("", "shows", "our result", "status", "full, GPU-hours")
INTRODUCTION = Path(__file__).with_name("introduction.md").read_text(encoding="utf-8")
TINY = "1.8M parameters, 100 steps, one seed"
"""What the introduction calls a tiny run."""
DIAGRAM = "A diagram."


def page(papers: Mapping[str, Paper], hours: Mapping[str, Hours]) -> str:
    """Return the whole page."""
    counts = Counter(item.status for paper in papers.values() for item in paper.items.values())
    parts = [INTRODUCTION, counted(counts)]
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


def counted(counts: Counter[Status]) -> str:
    """How many items have which status."""
    total = sum(counts.values())
    return f"Of {total} items: " + ", ".join(f"{n} {s}" for s, n in counts.most_common()) + ".\n"


def line(paper: str, key: str, item: Item, hours: Mapping[str, Hours]) -> tuple[str, ...]:
    """Return the row of an item."""
    result = (item.result or "").replace(TINY, "tiny")
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
    """The name of an item as people write it."""
    return key.replace("_", " ")


def shown(runs: Sequence[Hours]) -> str:
    """GPU-hours of runs together, and GPUs of each."""
    if not runs:
        return ""
    return f"{sum(run['gpu_hours'] for run in runs):,.0f} on {max(run['gpus'] for run in runs)}"
