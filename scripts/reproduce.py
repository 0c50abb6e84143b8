"""Repeat the papers' synthetic experiments and check their numbers. See docs/papers.md.

    python scripts/reproduce.py
    python scripts/reproduce.py relu_features pi_bound --output runs/reproduce --format png
    python scripts/reproduce.py --list

Each experiment writes NAME.json (measured and expected numbers, settings, versions, data) and a
figure; results.json and table.md contain the checks of all experiments in the folder. The exit code
is 1 if a check failed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.section import named
from scripts.command import command, require
from training.errors import InputError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments (default: all)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/reproduce"),
        help="output folder (default: runs/reproduce)",
    )
    parser.add_argument("--seed", type=int, help="seed (default: each experiment's own)")
    parser.add_argument(
        "--small", action="store_true", help="run at a tiny size and check only properties"
    )
    parser.add_argument("--format", choices=("svg", "png", "pdf"), default="svg", help="of figures")
    parser.add_argument("--list", action="store_true", help="list the experiments and exit")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run experiments; return 0 if every check passed, else 1."""
    options = parse(arguments)
    require("matplotlib")
    from scripts.experiments.experiment import perform
    from scripts.experiments.summary import EXPERIMENTS, text, write_summary

    if options.list:
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name}: {experiment.title}")
        return 0
    for name in options.names:
        if name not in EXPERIMENTS:
            raise InputError(f"experiments must be {named(name, EXPERIMENTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    results = []
    for name in dict.fromkeys(options.names or EXPERIMENTS):
        result = perform(
            EXPERIMENTS[name],
            options.output,
            seed=options.seed,
            small=options.small,
            suffix=f".{options.format}",
        )
        verdict = f"{result.failed} of {len(result.checks)} FAILED" if result.failed else "passed"
        print(f"{name}: {verdict}, {result.seconds:.0f} s", flush=True)
        results.append(result)
    write_summary(options.output, EXPERIMENTS)
    print(text(results))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
