"""Timing, records and tables of all benchmarks.

On a GPU, CUDA events measure device time. On a CPU, times are processor times of this process.
Other work on the machine disturbs them less than wall times. The compared variants run alternately
in one process. Compare only times of the same run.
"""

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from scripts.command import write_whole
from spectral.kernels.dispatch import device_name
from training.machine.device import versions
from training.report.text import table

FLUSHED_BYTES = 1 << 28
"""Bytes written between two calls on a GPU to flush its L2 cache: several times the cache size."""
MIB = 2**20

Call = Callable[[], object]
T = TypeVar("T")


def timed(call: Call, device: torch.device, before: Call = lambda: None) -> tuple[float, float]:
    """Return the milliseconds until the device finishes a call, and until the call returns.

    Both times start after `before` was called. On a GPU, events measure the first time. On a CPU,
    both times are the same processor time, and `before` is not called.
    """
    if device.type != "cuda":
        begin = time.process_time()
        call()
        spent = 1e3 * (time.process_time() - begin)
        return spent, spent
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    begin = time.perf_counter()
    call()
    host = 1e3 * (time.perf_counter() - begin)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end), host


def milliseconds(call: Call, device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of a call with a cold cache, after one untimed call, which may
    compile."""
    call()
    # Filling `scratch` keeps the device busy until the host has launched the call.
    size = FLUSHED_BYTES if device.type == "cuda" else 0
    scratch = torch.empty(size, dtype=torch.int8, device=device)
    return statistics.median(timed(call, device, scratch.zero_)[0] for _ in range(repeats))


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int, warm_up: int) -> dict[str, list[T]]:
    """Call every variant once per round. Return the results of the rounds after `warm_up`."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(warm_up + rounds):
        for name, side in sides.items():
            result = side()
            if turn >= warm_up:
                results[name].append(result)
    return results


def record(
    script: str, arguments: Sequence[str] | None, device: torch.device, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `figures` with the command, date, device and versions needed to reproduce them.

    `script` is a path in the repository. `arguments` are the arguments of the script's `main`, or
    None for `sys.argv`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", script, *words]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **figures,
    }


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as one table, with three decimals for floats and empty cells for None."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)

    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    print(table(columns, cells, numbers=True))


def write_json(path: Path | None, content: object) -> None:
    """Write `content` as JSON to `path`, if a path is given."""
    if path is not None:
        write_whole(path, json.dumps(content, indent=2) + "\n")
