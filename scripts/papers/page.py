"""docs/papers.md, written from introduction.md, papers.yaml and gpu_hours.json alone."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from scripts.papers.catalogue import Item, Paper, Status
from scripts.papers.figure import figure_file
from scripts.papers.gpu_hours import Hours, key_of
from training.report.table import markdown_table

HEADINGS = ("", "shows", "tiny", "our result", "full, GPU-hours", "status")
INTRODUCTION = Path(__file__).with_name("introduction.md").read_text()


def page(papers: Mapping[str, Paper], hours: Mapping[str, Hours]) -> str:
    """Return the whole page."""
    counts = Counter(item.status for paper in papers.values() for item in paper.items.values())
    parts = [INTRODUCTION, counted(counts)]
    for name, paper in papers.items():
        lines = [line(name, key, item, hours) for key, item in paper.items.items()]
        parts.append(f'\n## {name}: "{paper.title}"\n\n{markdown_table(HEADINGS, lines)}')
    return "".join(parts)


def counted(counts: Counter[Status]) -> str:
    """How many items have which status."""
    total = sum(counts.values())
    return f"Of {total} items: " + ", ".join(f"{n} {s}" for s, n in counts.most_common()) + ".\n"


def line(paper: str, key: str, item: Item, hours: Mapping[str, Hours]) -> tuple[str, ...]:
    """Return the row of an item."""
    result = item.result or ""
    if item.file is not None and result:
        links = f"[{item.file.rsplit('/', 1)[-1]}](../{item.file})"
        if item.measure is not None:
            links += f", [figure](../{figure_file(paper, key).as_posix()})"
        result += f" ({links})"
    return (
        key.replace("_", " "),
        item.shows,
        "<br>".join(f"`{command}`" for command in item.tiny),
        " ".join(part for part in (result, item.why) if part),
        "<br>".join(f"`{run}` {shown(hours[key_of(run)])}" for run in item.full),
        item.status,
    )


def shown(hours: Hours) -> str:
    """GPU-hours and GPUs of a run."""
    return f"{hours['gpu_hours']:,.0f} on {hours['gpus']}"
