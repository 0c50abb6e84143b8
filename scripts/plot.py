"""Draws figures of runs, checkpoints and studies as SVG, PNG or PDF.

python scripts/plot.py loss runs/tiny_adamw runs/tiny_sso --output loss.png
python scripts/plot.py spectrum runs/tiny_adamw_pc --output spectrum.svg --roles o down
python scripts/plot.py study runs/studies/pc_tiny/results.json --output study.svg
python scripts/plot.py maps --output maps.svg
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.errors import InputError, print_error  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--output", type=Path, required=True, help=".svg, .png or .pdf")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    loss = kinds.add_parser("loss", parents=[output], help="loss curves of runs, overlaid")
    loss.add_argument("runs", type=Path, nargs="+", help="run folders")
    spectrum = kinds.add_parser(
        "spectrum", parents=[output], help="singular values of weights, with PC layers of both"
    )
    spectrum.add_argument("run", type=Path, help="run folder or checkpoint")
    spectrum.add_argument("--roles", nargs="+", help="what to show; all without this")
    study = kinds.add_parser("study", parents=[output], help="a study's differences")
    study.add_argument("results", type=Path, help="results.json of scripts/study.py")
    kinds.add_parser("maps", parents=[output], help="the polynomials of PC layers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    try:
        from scripts.plots.style import check_target, save
    except ImportError as error:
        print_error(f"{error}: install the extra `plot`")
        return 2
    try:
        check_target(options.output)
        match options.kind:
            case "loss":
                from scripts.plots.loss import plot_loss

                figure = plot_loss(options.runs)
            case "spectrum":
                from scripts.plots.spectrum import plot_spectrum

                figure = plot_spectrum(options.run, options.roles)
            case "study":
                from scripts.plots.study import plot_study

                figure = plot_study(options.results)
            case "maps":
                from scripts.plots.maps import plot_maps

                figure = plot_maps()
    except InputError as error:
        print_error(error)
        return 2
    save(figure, options.output)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
