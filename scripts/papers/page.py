"""docs/papers.md, written from papers.yaml and gpu_hours.json alone."""

from collections import Counter
from collections.abc import Mapping

from scripts.papers.catalogue import Item, Paper, Status
from scripts.papers.figure import figure_file
from scripts.papers.gpu_hours import Hours, key_of
from training.report.table import markdown_table

HEADINGS = ("", "shows", "tiny", "our result", "full, GPU-hours", "status")
INTRODUCTION = """# The papers, table by table

Every numbered table and figure of the papers, what redoes it on a laptop and at the paper's size,
and what came out here. This page is made from [papers.yaml](../scripts/papers/papers.yaml) by

    python scripts/paper.py --page > docs/papers.md

To see what an item would run, with GPU-hours and the paper's numbers, and to run it:

    python scripts/paper.py pc_layer figure_3 --tiny --dry-run
    python scripts/paper.py pc_layer figure_3 --tiny
    python scripts/paper.py pc_layer figure_3 --full --dry-run
    python scripts/paper.py pc_layer figure_5 --measure

`--measure` writes what a row measures in its finished tiny runs to its file, with commands and
commit, prints its table and draws its figure. A person wrote the sentence of the row; tests compare
its numbers with the file, and its status with what the paper states.
`--plot-only` draws from finished runs. `--full` needs the GPUs that the command names; beyond
eight it submits SLURM jobs.

What the last column says:

* **reproduced**: the paper's statement holds in our run, at the size that the result names.
* **contradicts**: it does not hold there. A tiny model is no disproof of a statement about a large
  one.
* **cannot tell**: it was run, and the size or the number of seeds does not decide.
* **not run**: no result is committed, and the row says why.
* **nothing to run**: a diagram or a definition.

No full run has been done. GPU-hours are estimates of the planner on H100s
([planning.md](planning.md)), not measurements. Tiny results are of models of 0.1M to 1.8M
parameters, trained on at most a few tokens per parameter, those of 100 steps on a quarter of one:
they test code and direction, not the papers' sizes. One seed is one seed.

"""


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
