"""Plot runs, checkpoints and studies, and write HTML reports on runs.

    python scripts/plot.py runs/tiny_adamw runs/tiny_sso --output figures --format png
    python scripts/plot.py runs/tiny_sso --html
    python scripts/plot.py compare runs
    python scripts/plot.py compare runs/tiny_adamw runs/tiny_sso --output two.html
    python scripts/plot.py spectrum runs/tiny_adamw_pc --output spectrum.svg --roles o down
    python scripts/plot.py study runs/studies/radius/results.json --output study.svg
    python scripts/plot.py study runs/widths/results.json --by optimizer.matrix.lr --output lr.svg
    python scripts/plot.py maps --output maps.svg

Without a subcommand, the script writes every figure that the given runs have data for. Figures
overlay the runs, or show them separately where an overlay would be unreadable. With --html, the
script writes one report per run instead. `compare` writes a single page that compares all runs in
the given folders.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import command, output_path, require, write_whole
from training.command_line import Parser
from training.errors import InputError

KINDS = ("figures", "compare", "spectrum", "study", "maps")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Without a subcommand in `KINDS`, the subcommand is `figures`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in (*KINDS, "-h", "--help"):
        given = ["figures", *given]
    output = Parser(add_help=False)
    output.add_argument(
        "--output", type=output_path, required=True, help="output file (.svg, .png or .pdf)"
    )
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    runs = kinds.add_parser("figures", help="draw all figures of runs, or write a report per run")
    runs.add_argument("runs", type=Path, nargs="+", help="run folders")
    runs.add_argument(
        "--output",
        type=output_path,
        help="output folder (default: figures/ in the first RUN; with --html, each RUN)",
    )
    form = runs.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("svg", "png", "pdf"), default="svg")
    form.add_argument("--html", action="store_true", help="write report.html for each run")
    compare = kinds.add_parser("compare", help="write one page that compares several runs")
    compare.add_argument(
        "folders", type=Path, nargs="+", help="run folders, or folders with runs at any depth"
    )
    compare.add_argument(
        "--output",
        type=output_path,
        help="output page (default: compare.html in the common parent folder)",
    )
    spectrum = kinds.add_parser(
        "spectrum", parents=[output], help="plot the singular values of W and PC(W)"
    )
    spectrum.add_argument("run", type=Path, help="run folder or checkpoint")
    spectrum.add_argument("--roles", nargs="+", help="roles to show (default: all)")
    study = kinds.add_parser("study", parents=[output], help="plot the loss differences of a study")
    study.add_argument("results", type=Path, help="results.json written by scripts/study.py")
    shown = study.add_mutually_exclusive_group()
    shown.add_argument("--by", help="plot the losses against this tuned config key")
    shown.add_argument(
        "--curves", nargs="+", metavar="VARIANT", help="plot the loss curves of these variants"
    )
    kinds.add_parser("maps", parents=[output], help="plot the PC layer polynomials")
    return parser.parse_args(given)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the requested figures and print their paths."""
    options = parse(arguments)
    require("matplotlib")
    if options.kind == "figures":
        written = draw_runs(options)
    elif options.kind == "compare":
        written = [compare_runs(options)]
    else:
        written = [draw_one(options)]
    for path in written:
        print(f"wrote {path}")
    return 0


def compare_runs(options: argparse.Namespace) -> Path:
    """Write the comparison page and return its path."""
    from scripts.plots.compare import comparison

    parent = Path(os.path.commonpath([folder.absolute() for folder in options.folders]))
    if len(options.folders) == 1:
        parent = options.folders[0]
    path: Path = options.output or parent / "compare.html"
    if path.suffix != ".html":
        raise InputError(f"--output must end in .html, got {path}")
    write_whole(path, comparison(parent, options.folders))
    return path


def draw_runs(options: argparse.Namespace) -> list[Path]:
    """Write all figures of the runs, or a report per run, and return the paths."""
    from scripts.plots.compare import LOSS, warn_of_unlike, with_contents
    from scripts.plots.run_data import read_run
    from scripts.plots.run_figures import write_figures
    from scripts.plots.run_page import report

    runs = [read_run(folder) for folder in options.runs]
    if len({run.name for run in runs}) < len(runs):
        raise InputError(
            f"run folders must have different names, got {', '.join(run.name for run in runs)}"
        )
    if not options.html:
        warn_of_unlike(runs, with_contents(runs), LOSS[0])
        for run in runs:
            if not run.metrics:
                raise InputError(f"{run.folder} has not logged any steps yet")
        folder = options.output or options.runs[0] / "figures"
        if options.output is None and folder.is_symlink():
            raise InputError(f"{folder} must not be a symlink; set --output to its target")
        return write_figures(runs, folder, f".{options.format}")
    pages = []
    for run in runs:
        file = f"{run.name}.html" if options.output else "report.html"
        pages.append((options.output or run.folder) / file)
        write_whole(pages[-1], report(run))
    return pages


def draw_one(options: argparse.Namespace) -> Path:
    """Write a single figure and return its path."""
    from scripts.plots.style import check_target, save

    target: Path = options.output
    check_target(target)
    match options.kind:
        case "spectrum":
            from scripts.plots.effective_weights import plot_spectrum

            figure = plot_spectrum(options.run, options.roles)
        case "study":
            from scripts.plots.study_figures import plot_curves, plot_losses, plot_study

            if options.by is not None:
                figure = plot_losses(options.results, options.by)
            elif options.curves is not None:
                figure = plot_curves(options.results, options.curves)
            else:
                figure = plot_study(options.results)
        case _:
            from scripts.plots.effective_weights import plot_maps

            figure = plot_maps()
    save(figure, target)
    return target


if __name__ == "__main__":
    sys.exit(main())
