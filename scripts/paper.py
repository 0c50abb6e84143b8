"""Reproduce a table or figure from a paper, on a laptop or at full size. See docs/papers.md.

    python scripts/paper.py --list
    python scripts/paper.py pc_layer figure_3 --tiny --dry-run
    python scripts/paper.py pc_layer figure_3 --tiny
    python scripts/paper.py pc_layer figure_3 --full --dry-run
    python scripts/paper.py pc_layer figure_3 --tiny --plot-only
    python scripts/paper.py pc_layer figure_5 --measure

The script prints the commands, their estimated GPU-hours and the paper's numbers. It then runs or
submits the commands in order, and plots the finished runs. It stops at the first command that
fails.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from models.section import one_of
from scripts.command import command, new_parser
from training.errors import InputError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("paper", nargs="?", help="paper name (see --list)")
    parser.add_argument("item", nargs="?", help="figure_N, table_N or another item (see --list)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="run on a laptop (default)")
    size.add_argument("--full", action="store_true", help="run at the paper's scale")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("--plot-only", action="store_true", help="only plot finished runs")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="record the results of finished tiny runs in the item's JSON file and figure",
    )
    parser.add_argument("--list", action="store_true", help="list papers and items and exit")
    parser.add_argument("--page", action="store_true", help="print docs/papers.md and exit")
    parser.add_argument(
        "--plan", action="store_true", help="estimate and store GPU-hours of the full runs and exit"
    )
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested commands. Return the exit code of the first command that fails, or 0."""
    options = parse(arguments)
    # Deferred: these modules import torch, pandas and matplotlib.
    from scripts.papers.catalogue import (
        commands,
        describe,
        plotting,
        read_catalogue,
        read_hours,
        write_hours,
        write_measured,
    )
    from scripts.papers.page import draw, figure_file, page
    from scripts.plots.style import save

    papers = read_catalogue()
    if options.plan:
        write_hours(run for p in papers.values() for each in p.items.values() for run in each.full)
        return 0
    if options.page:
        print(page(papers, read_hours()), end="")
        return 0
    if options.list:
        for name, paper in papers.items():
            print(f"{name}: {paper.title}")
            for key, item in paper.items.items():
                print(f"  {key}: {item.shows} ({item.status})")
        return 0
    paper = papers[checked_name("paper", options.paper, list(papers))]
    item = paper.items[checked_name("item", options.item, list(paper.items))]
    if options.measure:
        write_measured(item)
        save(draw(item), ROOT / figure_file(options.paper, options.item))
        return 0
    runs = commands(item, full=options.full)
    figures = Path("runs/papers") / f"{options.paper}_{options.item}.svg"
    drawing = plotting(item, figures, full=options.full)
    describe(item, [] if options.plot_only else runs, drawing, full=options.full)
    if options.dry_run:
        return 0
    if not runs and not drawing:
        raise InputError(f"{options.item} has no {'full' if options.full else 'tiny'} command")
    (ROOT / figures).parent.mkdir(parents=True, exist_ok=True)
    for each in [*([] if options.plot_only else runs), *drawing]:
        done = subprocess.run(each, cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    return 0


def checked_name(what: str, name: str | None, names: Sequence[str]) -> str:
    """Return `name` if it is in `names`. Otherwise raise an InputError that suggests the closest
    name."""
    if name in names:
        return str(name)
    raise InputError(f"{what} must be {one_of(name or '', names)}")


if __name__ == "__main__":
    sys.exit(main())
