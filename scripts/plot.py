"""Draw figures of runs, checkpoints and studies, and write HTML pages about runs.

    python scripts/plot.py runs/tiny_adamw runs/tiny_sso --output figures --format png
    python scripts/plot.py runs/tiny_sso --html
    python scripts/plot.py compare runs
    python scripts/plot.py compare runs/tiny_adamw runs/tiny_sso --output two.html
    python scripts/plot.py spectrum runs/tiny_adamw_pc --output spectrum.svg --roles o down
    python scripts/plot.py study runs/studies/radius/results.json --output study.svg
    python scripts/plot.py study runs/widths/results.json --by optimizer.matrix.lr --output lr.svg
    python scripts/plot.py maps --output maps.svg

Without a subcommand, the script writes every figure for which the given runs have data. Figures
overlay several runs, or show each run separately if an overlay would be unreadable. With --html the
script writes a page per run instead. `compare` writes one page about all runs in the given folders.
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
        "--output", type=output_path, required=True, help="file: .svg, .png or .pdf"
    )
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    runs = kinds.add_parser("figures", help="draw all figures of runs, or write a page per run")
    runs.add_argument("runs", type=Path, nargs="+", help="run folders")
    runs.add_argument(
        "--output",
        type=output_path,
        help="output folder (default: RUN/figures of the first RUN; with --html, each RUN)",
    )
    form = runs.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("svg", "png", "pdf"), default="svg")
    form.add_argument("--html", action="store_true", help="write a page report.html per run")
    compare = kinds.add_parser("compare", help="write one page about several runs")
    compare.add_argument(
        "folders", type=Path, nargs="+", help="run folders, or folders with runs at any depth"
    )
    compare.add_argument(
        "--output",
        type=output_path,
        help="page to write (default: compare.html in the common parent folder)",
    )
    spectrum = kinds.add_parser(
        "spectrum", parents=[output], help="draw singular values of weights W and PC(W)"
    )
    spectrum.add_argument("run", type=Path, help="run folder or checkpoint")
    spectrum.add_argument("--roles", nargs="+", help="roles to show (default: all)")
    study = kinds.add_parser("study", parents=[output], help="draw loss differences of a study")
    study.add_argument("results", type=Path, help="results.json of scripts/study.py")
    shown = study.add_mutually_exclusive_group()
    shown.add_argument("--by", help="draw the losses against the values of this searched key")
    shown.add_argument(
        "--curves", nargs="+", metavar="VARIANT", help="draw the loss curves of these variants"
    )
    kinds.add_parser("maps", parents=[output], help="draw the polynomials of PC layers")
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
    """Write the page that compares the runs. Return its path."""
    from scripts.plots.compare import comparison

    around = Path(os.path.commonpath([folder.absolute() for folder in options.folders]))
    if len(options.folders) == 1:
        around = options.folders[0]
    path: Path = options.output or around / "compare.html"
    if path.suffix != ".html":
        raise InputError(f"--output must end in .html, got {path}")
    write_whole(path, comparison(around, options.folders))
    return path


def draw_runs(options: argparse.Namespace) -> list[Path]:
    """Write all figures of the runs, or a page per run. Return the paths."""
    from scripts.plots.run_data import read_run
    from scripts.plots.run_figures import write_figures
    from scripts.plots.run_page import report

    runs = [read_run(folder) for folder in options.runs]
    if len({run.name for run in runs}) < len(runs):
        raise InputError(
            f"run folders must have different names, got {', '.join(run.name for run in runs)}"
        )
    if not options.html:
        for run in runs:
            if not run.metrics:
                raise InputError(f"{run.folder} has not logged a step yet")
        folder = options.output or options.runs[0] / "figures"
        if options.output is None and folder.is_symlink():
            raise InputError(f"{folder} must not be a link; pass its target as --output")
        return write_figures(runs, folder, f".{options.format}")
    pages = []
    for run in runs:
        file = f"{run.name}.html" if options.output else "report.html"
        pages.append((options.output or run.folder) / file)
        write_whole(pages[-1], report(run))
    return pages


def draw_one(options: argparse.Namespace) -> Path:
    """Write one figure. Return its path."""
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
