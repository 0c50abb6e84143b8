"""The commands of an item of a paper, their cost, and the file of their measurements."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.command import write_whole
from scripts.papers.catalogue import Item, full_command, key_of, read_hours
from scripts.papers.measured import ROOT, measure, seeded, statistics_table, to_json, trains
from training.errors import InputError


def write_measured(item: Item) -> None:
    """Write the file of an item's result from its finished tiny runs, and print its table.

    Raises InputError if the item measures nothing, or a run is missing.
    """
    if item.measure is None or item.file is None:
        raise InputError(f"--measure needs an item with `measure` in papers.yaml, got {item.shows}")
    content = measure(item.measure, item.tiny)
    write_whole(ROOT / item.file, to_json(content))
    print(statistics_table(content).to_string(index=False))


def commands(item: Item, *, full: bool) -> list[list[str]]:
    """Return the commands of an item, with this interpreter as python."""
    if full:
        hours = read_hours()
        return [full_command(run, hours[key_of(run)]["gpus"]) for run in item.full]
    seeds = item.measure.seeds if item.measure is not None else []
    each = (run for text in item.tiny for run in (seeded(text, seeds) if trains(text) else [text]))
    split = map(shlex.split, each)
    return [[sys.executable if word == "python" else word for word in words] for words in split]


def plotting(item: Item, output: Path, *, full: bool) -> list[list[str]]:
    """Return the command that draws the item, if any."""
    arguments = item.full_plot if full else item.plot
    if arguments is None:
        return []
    return [
        [
            sys.executable,
            "scripts/plot.py",
            *shlex.split(arguments.format(output=output.as_posix())),
        ]
    ]


def describe(
    item: Item, runs: Sequence[Sequence[str]], drawing: Sequence[Sequence[str]], *, full: bool
) -> None:
    """Print the item's subject, its commands, their cost and the paper's figures."""
    print(f"shows: {item.shows}")
    for label, value in (
        ("paper's numbers", item.expected),
        ("our result", item.result),
        ("note", item.why),
    ):
        if value is not None:
            print(f"{label}: {value}")
    hours = read_hours()
    for index, each in enumerate(runs):
        time = f"  # {hours[key_of(item.full[index])]['gpu_hours']:,.0f} GPU-hours" if full else ""
        print(f"runs: {shlex.join(each)}{time}")
    for each in drawing:
        print(f"draws: {shlex.join(each)}")
