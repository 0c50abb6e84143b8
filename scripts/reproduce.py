"""Run the papers' synthetic experiments and check their numbers. See docs/papers.md.

    python scripts/reproduce.py
    python scripts/reproduce.py relu_features pi_bound --output runs/reproduce --format png
    python scripts/reproduce.py --list

Each experiment writes a figure, and a NAME.json file with measured and expected numbers, settings,
versions and data. results.json and table.md list the checks of all experiments. The exit code is 1
if any check fails.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.section import one_of
from scripts.command import command, new_parser, output_path, require
from training.errors import InputError
from training.report.text import markdown_table, table

NOTE = (
    "step sizes and expected ranges were tuned for the published seeds and sizes; with others, "
    "checks may fail and training may diverge"
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="experiments to run (default: all)"
    )
    parser.add_argument(
        "--output",
        type=output_path,
        default=Path("runs/reproduce"),
        help="output folder (default: runs/reproduce)",
    )
    parser.add_argument("--seed", type=int, help="random seed (default: the published seed)")
    parser.add_argument(
        "--small",
        action="store_true",
        help="use tiny sizes and skip the comparison with recorded numbers",
    )
    parser.add_argument(
        "--format", choices=("svg", "png", "pdf"), default="svg", help="figure format"
    )
    parser.add_argument("--list", action="store_true", help="list the experiments and exit")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments. Return 0 if all checks pass, else 1."""
    options = parse(arguments)
    require("matplotlib")
    from scripts.experiments.runner import EXPERIMENTS, HEADINGS, perform, rows, write_json

    if options.list:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name}: {experiment.title}")
        return 0
    for name in options.names:
        if name not in EXPERIMENTS:
            raise InputError(f"experiments must be {one_of(name, EXPERIMENTS)}")
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    results = []
    for name in dict.fromkeys(options.names or EXPERIMENTS):
        result = perform(
            name, output, seed=options.seed, small=options.small, suffix=f".{options.format}"
        )
        verdict = f"{result.failed} of {len(result.checks)} FAILED" if result.failed else "passed"
        print(f"{name}: {verdict}, {result.seconds:.0f} s", flush=True)
        results.append(result)
    write_json(output / "results.json", [result.content() for result in results])
    lines = [line for result in results for line in rows(result)]
    (output / "table.md").write_text(markdown_table(HEADINGS, lines), encoding="utf-8")
    print(table(HEADINGS, lines))
    if options.small or options.seed is not None:
        print(NOTE)
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
