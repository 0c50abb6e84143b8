#!/usr/bin/env python
"""Prepare a multiple-choice task for scoring during training (`tasks.files`).

scripts/prepare_task.py hf:allenai/ai2_arc:ARC-Easy:test --format arc --output data/tasks/arc.jsonl
scripts/prepare_task.py examples.parquet --output data/tasks/own.jsonl
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder

from scripts.command import command, counted, new_parser, output_path, whole_number, write_whole
from training.data.tasks import KEYS, Example, example_of
from training.errors import DataError, InputError
from training.json_file import real_path

LETTERS: Final = "ABCDE"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A row format.

    example   function that maps a row to the fields of an `Example`, in order
    sources   hub datasets in this format, each with a split that contains answers
    """

    example: Callable[[Row], tuple[str, list[str], int]]
    sources: tuple[str, ...] = ()


def _plain(row: Row) -> tuple[str, list[str], int]:
    return row["context"], row["choices"], row["answer"]


def _arc(row: Row) -> tuple[str, list[str], int]:
    return f"Question: {row['question']}\nAnswer:", *_labelled(row)


def _openbookqa(row: Row) -> tuple[str, list[str], int]:
    return row["question_stem"], *_labelled(row)


def _labelled(row: Row) -> tuple[list[str], int]:
    texts, answer = row["choices"]["text"], row["answerKey"].lstrip()
    right = [label == answer for label, _ in zip(row["choices"]["label"], texts, strict=True)]
    return texts, right.index(True)


def _commonsense_qa(row: Row) -> tuple[str, list[str], int]:
    listed = zip(LETTERS, row["choices"]["text"], strict=True)
    lines = [f"{letter}. {text}" for letter, text in listed]
    question = "\n".join([f"Question: {row['question'].strip()}", *lines, "Answer:"])
    return question, list(LETTERS), LETTERS.index(row["answerKey"])


def _piqa(row: Row) -> tuple[str, list[str], int]:
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def _boolq(row: Row) -> tuple[str, list[str], int]:
    question = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return question, ["no", "yes"], row["label"]


def _sciq(row: Row) -> tuple[str, list[str], int]:
    wrong = [row[f"distractor{number}"] for number in (1, 2, 3)]
    question = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    return question, [*wrong, row["correct_answer"]], 3


def _hellaswag(row: Row) -> tuple[str, list[str], int]:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _cleaned(context), [_cleaned(text) for text in row["endings"]], int(row["label"])


def _cleaned(text: str) -> str:
    """Remove bracketed annotations from a WikiHow text, as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


FORMATS: Final[Mapping[str, Format]] = {
    "plain": Format(_plain),
    "arc": Format(
        _arc, ("hf:allenai/ai2_arc:ARC-Easy:test", "hf:allenai/ai2_arc:ARC-Challenge:test")
    ),
    "boolq": Format(_boolq, ("hf:aps/super_glue:boolq:validation",)),
    "commonsense_qa": Format(_commonsense_qa, ("hf:tau/commonsense_qa::validation",)),
    "hellaswag": Format(_hellaswag, ("hf:Rowan/hellaswag::validation",)),
    "openbookqa": Format(_openbookqa, ("hf:allenai/openbookqa:main:test",)),
    "piqa": Format(_piqa, ("hf:baber/piqa::validation",)),
    "sciq": Format(_sciq, ("hf:allenai/sciq::test",)),
}
"""Row formats by name. `plain` rows already are examples."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the examples as JSON lines and print how many there are."""
    options = parse(arguments)
    if options.output.suffix != ".jsonl":
        raise InputError(f"--output must end in .jsonl, got {options.output}")
    if options.output.exists() and real_path(options.output) == real_path(options.source):
        raise InputError(f"--output must not be the source file, got {options.output}")
    rows = list(islice(examples(options.source, options.format), options.limit))
    if not rows:
        raise DataError(f"{options.source} contains no rows")
    write_whole(options.output, "".join(each.line() for each in rows))
    choices = [len(each.choices) for each in rows]
    chance = sum(1 / count for count in choices) / len(choices)
    print(
        f"wrote {options.output}: {counted(len(rows), 'example')}, {sum(choices):,} choices, "
        f"chance accuracy {chance:.3f}; to score the task in a run, set "
        f"tasks.files.{options.output.stem}={options.output}"
    )
    return 0


def examples(source: str, name: str) -> Iterator[Example]:
    """Yield an example for each row of a source in the format `name`.

    Raises DataError if the source cannot be read, or if a row does not match the format or has no
    answer.
    """
    from scripts.data.document_files import rows_of  # deferred: slow imports
    from scripts.data.sources import find_inputs

    listing = find_inputs(source)
    if listing.ignored:
        print(f"{source}: {listing}")
    for each in listing.inputs:
        if not each.has_keys:
            raise DataError(
                f"the suffix of {each} must be .parquet, .jsonl, .ndjson or .json; a JSON "
                "suffix may be followed by .gz, .xz, .zst or .zstd"
            )
    for where, row in chain.from_iterable(map(rows_of, listing.inputs)):
        try:
            values = FORMATS[name].example(row)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            missing = isinstance(error, KeyError)
            got = f"no key {error} among {', '.join(row)}" if missing else f"{row!r:.200}"
            raise DataError(
                f"{where}: the row must have the format {name} and contain an answer, got {got}; "
                "some test splits contain no answers"
            ) from None
        yield example_of(dict(zip(KEYS, values, strict=True)), where)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    formats = "; ".join(f"{name}: {', '.join(each.sources)}" for name, each in FORMATS.items()
                      if each.sources)  # fmt: skip
    parser = new_parser(__doc__)
    parser.epilog = f"Formats (same prompts as lm-eval) and their hub datasets: {formats}"
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="hf:NAME[:CONFIG][:SPLIT], or .jsonl or .parquet files: a file, a folder or a quoted "
        "glob",
    )
    parser.add_argument("--output", type=output_path, required=True, help="output .jsonl file")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="plain",
        help="row format (default: plain, with the keys context, choices and answer)",
    )
    parser.add_argument("--limit", type=whole_number(), help="write at most N examples")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
