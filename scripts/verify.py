#!/usr/bin/env python
"""Check run folders, checkpoints and prepared data for damage.

    scripts/verify.py runs/tiny_sso data/demo

The script checks every file against its recorded hash and reads every tensor of a checkpoint.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import command, new_parser
from training.errors import DataError, InputError, near_name
from training.report.text import progress, table

if TYPE_CHECKING:
    from torch import Tensor

    from training.checkpoint.stored_checkpoint import CheckpointInfo
    from training.data.manifest import Manifest

Row = tuple[str, str]
"""A path and its verdict: `GOOD`, `UNCHECKED` or a description of the damage."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of verdicts. Return 1 if anything is damaged."""
    options = parse(arguments)
    rows: list[Row] = []
    with progress(lambda: f"checked {len(rows)} files and folders so far"):
        for path in options.paths:
            rows.extend(verified(path))
    print(table(("what", "verdict"), rows))
    return int(any(verdict not in (GOOD, UNCHECKED) for _, verdict in rows))


GOOD = "good"
UNCHECKED = "good; byte counts of the text are not checked, because the tokenizer is not byte-level"
LONGEST = 10_000_000
"""Runs with at least this many steps are not checked for missing steps in their logs."""


def verified(path: Path) -> Iterator[Row]:
    """Yield the rows for a run, checkpoint or data folder. Raises InputError for any other path."""
    from models.engine import import_engine

    import_engine()
    from training.checkpoint import COMPLETE
    from training.checkpoint.checkpoints import FOLDER
    from training.checkpoint.stored_checkpoint import META
    from training.data.manifest import MANIFEST_FILE, read_manifest

    if (path / MANIFEST_FILE).is_file():
        for what, verdict in rows(path, data_problems(path)):
            partly = verdict == GOOD and not read_manifest(path).tokenizer.byte_level
            yield what, UNCHECKED if partly else verdict
    elif (path / META).is_file() or (path / COMPLETE).is_file():
        yield from rows(path, checkpoint_problems(path))
    elif (path / FOLDER).is_dir() or (path / "metrics.jsonl").is_file():
        yield from run_rows(path)
    else:
        raise InputError(
            f"{path} must be a run folder, a checkpoint or prepared data{near_name(path)}"
        )


def rows(path: Path, problems: Iterator[str]) -> Iterator[Row]:
    """Yield one row per problem, or a single `good` row if there are none. An error raised by
    `problems` counts as a problem."""
    verdicts = []
    try:
        for problem in problems:
            verdicts.append(problem)
    except (InputError, OSError) as error:
        verdicts.append(str(error))
    for verdict in verdicts or [GOOD]:
        yield str(path), verdict


def data_problems(folder: Path) -> Iterator[str]:
    """Yield a message for each mismatch between a prepared folder and its manifest.

    Raises DataError if the manifest cannot be read.
    """
    from training.data.hashes import file_sha256
    from training.data.manifest import MANIFEST_FILE, read_manifest
    from training.data.token_bytes import open_tokenizer, token_byte_lengths, vocabulary_size

    manifest = read_manifest(folder)
    for path in sorted(folder.glob("*.idx")):
        if path.stem not in manifest.sets:
            yield f"{path} cannot be checked, because {MANIFEST_FILE} does not list {path.stem}"
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != size:
            yield f"{path} must have {size} bytes, got {path.stat().st_size}"
    lengths = None
    try:
        stated, path = manifest.tokenizer, manifest.tokenizer_path
        if file_sha256(path) != stated.sha256:
            yield f"{path} is damaged: its sha256 does not match the manifest"
        lengths = token_byte_lengths(path)
        facts: dict[str, object] = {"vocab_size": vocabulary_size(path)}
        facts["byte_level"] = lengths is not None
        if stated.eod_token is not None:
            facts["eod_id"] = open_tokenizer(path).token_to_id(stated.eod_token)
        yield from unlike("tokenizer", stated, facts)
    except DataError as error:
        yield str(error)
    for name in manifest.sets:
        try:
            yield from set_problems(manifest, name, lengths)
        except DataError as error:
            yield str(error)


def set_problems(manifest: "Manifest", name: str, lengths: "Tensor | None") -> Iterator[str]:
    """Yield a message for each mismatch between a set and its manifest entry.

    `lengths` holds the byte length of each token, or is None if unknown. Raises DataError if the
    set is damaged.
    """
    from training.data.hashes import file_sha256
    from training.data.token_set import TokenSet

    entry, prefix = manifest.sets[name], manifest.folder / name
    vocabulary = manifest.tokenizer.vocab_size if lengths is None else len(lengths)
    tokens = TokenSet(name, prefix, 1, vocab_size=vocabulary, verify="full")
    for kind, expected in entry.sha256.items():
        if file_sha256(f"{prefix}.{kind}") != expected:
            yield f"{prefix}.{kind} is damaged: its sha256 does not match the manifest"
    largest, size = 0, 0
    for block in tokens.blocks(0, tokens.tokens):
        largest = max(largest, int(block.max()))
        size += 0 if lengths is None else int(lengths.numpy()[block].sum(dtype="int64"))
    facts = {"documents": tokens.documents(), "max_token": largest, "dtype": block.dtype.name}
    if lengths is not None:
        facts["bytes"] = size
    yield from unlike(f"token set {name}", entry, facts)


def unlike(what: str, stated: object, facts: Mapping[str, object]) -> Iterator[str]:
    """Compare the attributes of `stated` with the values in `facts`, by name. Yield a message for
    each difference."""
    for key, value in facts.items():
        if getattr(stated, key) != value:
            yield f"{what}: {key} must be {getattr(stated, key)}, got {value}"


def checkpoint_problems(path: Path) -> Iterator[str]:
    """Read every tensor of a checkpoint and yield a message for each problem."""
    from training.checkpoint.checkpoints import not_finite, problems, read_checkpoint

    info = read_checkpoint(path)
    yield from problems(info)
    yield from not_finite(info)


def run_rows(run_dir: Path) -> Iterator[Row]:
    """Yield the rows for a run: its checkpoints, `latest`, config and logs."""
    from training.checkpoint import checkpoints
    from training.report.log_lines import LOGS

    for step in checkpoints.steps(run_dir):
        folder = checkpoints.step_folder(run_dir, step)
        yield from rows(folder, checkpoint_problems(folder))
    newest = None
    with contextlib.suppress(InputError):  # there is no complete checkpoint
        newest = checkpoints.read_checkpoint(run_dir)
    if newest is not None:
        name, named = newest.path.name, checkpoints.latest_name(run_dir)
        verdict = GOOD if named == name else f"must name {name}, got {named!r:.60}"
        yield str(newest.path.parent / checkpoints.LATEST), verdict
    if os.path.lexists(run_dir / "config.yaml"):
        yield from rows(run_dir / "config.yaml", config_problems(run_dir / "config.yaml"))
    for name in LOGS:
        found = rows(run_dir / name, log_problems(run_dir, name, newest))
        missing = not os.path.lexists(run_dir / name)
        yield from (row for row in found if not missing or row[1] != GOOD)


def config_problems(path: Path) -> Iterator[str]:
    """Raise InputError if a saved config cannot be loaded."""
    from training.config import load_saved_config

    load_saved_config(path)
    yield from ()


def log_problems(run_dir: Path, name: str, newest: "CheckpointInfo | None") -> Iterator[str]:
    """Yield messages about damaged lines and missing steps in a log.

    Up to the checkpoint `newest`, metrics.jsonl and monitors.jsonl must contain every step that is
    a multiple of the file's interval. At each start, the run logs an event with both intervals.
    """
    from training.report.log_lines import read_lines

    log = read_lines(run_dir / name)
    exist = {each for each in ("config.yaml", "events.jsonl") if os.path.lexists(run_dir / each)}
    if name == "events.jsonl" and exist == {"config.yaml"}:
        yield "does not exist"
    if log.damaged:
        yield f"{log.damaged} damaged lines"
    if newest is None:
        return
    end = newest.step - bool(newest.meta.get("progress", {}).get("unreported"))
    steps: set[int] = set()
    for event in read_lines(run_dir / "events.jsonl").lines:
        intervals = event.get("intervals")
        if not isinstance(intervals, dict):
            continue
        steps = {step for step in steps if step <= event["step"]}
        interval = intervals.get(name.partition(".")[0])
        if isinstance(interval, int) and interval > 0 and end < LONGEST:
            begin = event["step"] // interval * interval + interval
            steps.update(range(begin, end + 1, interval))
    missing = sorted(steps - {line["step"] for line in log.lines})
    if missing:
        yield f"missing steps: {len(missing)}, from {missing[0]} to {missing[-1]}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN|CHECKPOINT|DATA")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
