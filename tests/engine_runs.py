"""Runs of the engine that Python finds first, in a process of its own.

    PYTHONPATH=ENGINE python -m tests.engine_runs CONFIG FOLDER [SAVED ...]

Trains with the config in the folder CONFIG, in FOLDER, or continues what each SAVED holds, and
writes FOLDER/losses.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.launch import run_on_ranks

CASES: list[tuple[dict[str, int], list[str]]] = [
    ({}, ["llama", "moe", "deepseek"]),
    ({"tensor": 2}, ["llama", "moe", "deepseek"]),
    ({"pipeline": 2}, ["llama", "moe", "deepseek"]),
    ({"context": 2}, ["llama", "moe", "deepseek"]),
    ({"expert": 2}, ["moe", "deepseek"]),
]
"""The layouts of two ranks, and the families that run on each."""

WORKERS = "tests.distributed.engine_workers"


def main(config: str, folder: str, *saved: str) -> None:
    """Run or continue, and write what `engine_workers` returned on the first rank."""
    common: dict[str, Any] = {"config": config, "folder": folder, "cases": CASES}
    found: dict[str, Any] = {}
    if not saved:
        found["version"], found["losses"] = run_on_ranks(2, WORKERS, "runs", common)[0]
    for each in saved:
        arguments = common | {"saved": each}
        found[Path(each).name] = run_on_ranks(2, WORKERS, "continuations", arguments)[0]
    (Path(folder) / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
