"""The command line of scripts/reproduce.py."""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from scripts.reproduce.frame import described, perform, plain, read_result
from scripts.reproduce.registry import EXPERIMENTS
from scripts.reproduce.report import markdown, text
from training.errors import InputError, print_error


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Repeats the papers' synthetic experiments and judges their numbers."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; all without one")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="folder")
    parser.add_argument("--seed", type=int, help="instead of each experiment's own")
    parser.add_argument(
        "--small", action="store_true", help="a tiny size, at which only properties are checked"
    )
    parser.add_argument("--format", choices=("svg", "png", "pdf"), default="svg", help="of figures")
    parser.add_argument("--list", action="store_true", help="name the experiments and stop")
    return parser.parse_args(arguments)


def chosen(names: Sequence[str]) -> list[str]:
    """The experiments to run. Raises InputError for an unknown name."""
    for name in names:
        if name not in EXPERIMENTS:
            close = difflib.get_close_matches(name, EXPERIMENTS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            known = ", ".join(EXPERIMENTS)
            raise InputError(f"experiments must be among {known}, got {name}{hint}")
    return list(dict.fromkeys(names)) or list(EXPERIMENTS)


def write_summary(output: Path) -> None:
    """None; results.json and table.md of every experiment whose result lies in the folder."""
    paths = [output / f"{name}.json" for name in EXPERIMENTS]
    results = [read_result(path) for path in paths if path.exists()]
    content = [
        {"name": result.name, "source": result.source, "seconds": round(result.seconds, 1)}
        | {"passed": not result.failed, "checks": [described(check) for check in result.checks]}
        for result in results
    ]
    summary = json.dumps(plain(content), indent=1, allow_nan=False) + "\n"
    (output / "results.json").write_text(summary, encoding="utf-8")
    (output / "table.md").write_text(markdown(results), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if every check passed, 1 if one did not, 2 for a wrong argument."""
    options = parse(arguments)
    if options.list:
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name}: {experiment.title} ({experiment.source})")
        return 0
    try:
        names = chosen(options.names)
        options.output.mkdir(parents=True, exist_ok=True)
    except (InputError, OSError) as error:
        print_error(error)
        return 2
    results = []
    for name in names:
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
    write_summary(options.output)
    print(text(results))
    return 1 if any(result.failed for result in results) else 0
