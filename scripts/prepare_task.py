#!/usr/bin/env python
"""Prepare a multiple-choice task, on which training scores the model (`tasks.files`).

scripts/prepare_task.py hf:allenai/ai2_arc:ARC-Easy:test --format arc --output data/tasks/arc.jsonl
scripts/prepare_task.py examples.parquet --output data/tasks/own.jsonl
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # installed or not, from anywhere

from scripts.command import command, whole_number, write_whole
from scripts.tasks.formats import FORMATS
from training.data.tasks import Example, example_of
from training.errors import DataError, InputError
from training.json_file import parse_json


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the examples, a line each, and print how many there are."""
    options = parse(arguments)
    if options.output.suffix != ".jsonl":
        raise InputError(f"--output must end in .jsonl, got {options.output}")
    rows = list(islice(examples(options.source, options.format), options.limit))
    if not rows:
        raise DataError(f"{options.source} has no rows")
    write_whole(options.output, "".join(each.line() for each in rows))
    choices = [len(each.choices) for each in rows]
    chance = sum(1 / count for count in choices) / len(choices)
    print(
        f"wrote {options.output}: {len(rows):,} examples, {sum(choices):,} choices, "
        f"{chance:.3f} by chance; tasks.files.{options.output.stem}={options.output} scores it"
    )
    return 0


def examples(source: str, name: str) -> Iterator[Example]:
    """Yield the example of each row of a source in the format `name`.

    Raises DataError for a row that is not of the format, or has no answer.
    """
    keys = ("context", "choices", "answer")
    for where, row in rows(source):
        try:
            values = FORMATS[name].example(row)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(
                f"{where}: not of the format {name}, or without an answer, as in some test "
                f"splits: {error!r:.80}"
            ) from None
        yield example_of(dict(zip(keys, values, strict=True)), where)


def rows(source: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a source, and what errors call them.

    The source is a dataset of the hub or a folder that `datasets` loads (`hf:NAME:CONFIG:SPLIT`), a
    Parquet file, or a file of a JSON object a line, which may be compressed. Raises DataError if it
    cannot be read.
    """
    from scripts.data.compression import read_lines  # here: these take a second
    from scripts.data.hub import parquet_rows, parse_hub_input

    if source.startswith("hf:"):
        for number, row in enumerate(parse_hub_input(source).rows(), start=1):
            yield f"{source}, row {number}", row
    elif source.endswith(".parquet"):
        if not Path(source).is_file():
            raise DataError(f"no file {source}")
        for number, row in enumerate(parquet_rows(source, data_files=source), start=1):
            yield f"{source}, row {number}", row
    else:
        for number, line in enumerate(read_lines(Path(source)), start=1):
            where = f"{source}, line {number}"
            if line.strip():
                try:
                    yield where, parse_json(line)
                except ValueError as error:
                    raise DataError(f"{where}: not JSON: {error}") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    formats = "; ".join(f"{name}: {', '.join(each.sources)}" for name, each in FORMATS.items()
                      if each.sources)  # fmt: skip
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"Formats and their data sets on the hub, as lm-eval reads them: {formats}",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="hf:NAME[:CONFIG][:SPLIT], or a .jsonl or .parquet file"
    )
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="plain",
        help="format of the rows (default: plain: context, choices, answer)",
    )
    parser.add_argument("--limit", type=whole_number(), help="examples to take (default: all)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
