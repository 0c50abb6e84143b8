#!/usr/bin/env python
"""Collect a corpus of documents from Debian packages. See docs/data.md.

scripts/make_corpus.py data/corpus_texts
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from scripts.command import command, output_path
from training.command_line import Parser

DESCRIPTION = _ROOT / "examples/data/corpus.yaml"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Collect the corpus. Exit with 2 if a package is unavailable or the texts do not match the
    recorded hash."""
    options = parse(arguments)
    from scripts.data.debian import read_corpus, write_set  # deferred: imports torch

    output = options.output.absolute()
    corpus = read_corpus(options.corpus)
    output.mkdir(parents=True, exist_ok=True)
    for name, content in corpus.sets.items():
        print(*write_set(name, content, _ROOT, output), sep="\n")
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description="Collect a corpus from Debian packages.")
    parser.add_argument(
        "output", type=output_path, help="output folder for NAME.jsonl and packages/"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=DESCRIPTION,
        help="corpus description (YAML file; default: %(default)s)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
