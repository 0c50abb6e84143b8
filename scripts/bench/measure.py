"""Timing, records and tables for all benchmarks.

On a GPU, device time is measured with CUDA events. On a CPU, times are this process's CPU time,
which is less sensitive to other load on the machine than wall-clock time. The variants of a
comparison are timed alternately in the same process. Only compare times from the same run.
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
"""Number of bytes to write between GPU calls to flush the L2 cache; several times the cache's
size."""
MIB = 2**20

Call = Callable[[], object]
T = TypeVar("T")


def timed(call: Call, device: torch.device, before: Call = lambda: None) -> tuple[float, float]:
    """Return a call's device time and host time in milliseconds.

    On a GPU, `before` is called first. The device time is measured with CUDA events, and the host
    time ends when the call returns. On a CPU, both times are the call's CPU time, and `before` is
    not called.
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
    """Return the median time of a call with a cold cache, in milliseconds.

    One untimed call precedes the timed calls, in case the first call compiles.
    """
    call()
    # Zeroing `scratch` keeps the device busy until the host has launched the call.
    size = FLUSHED_BYTES if device.type == "cuda" else 0
    scratch = torch.empty(size, dtype=torch.int8, device=device)
    return statistics.median(timed(call, device, scratch.zero_)[0] for _ in range(repeats))


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int, warm_up: int) -> dict[str, list[T]]:
    """Call every variant once per round. Return each variant's results without the warm-up
    rounds."""
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
    """Return `figures` plus the command, date, device and versions needed to reproduce them.

    `script` is a path in the repository. `arguments` are the arguments passed to the script's
    `main`; None means `sys.argv`.
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
    """Print rows as a table. Floats get three decimals, and None becomes an empty cell."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)

    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    print(table(columns, cells, numbers=True))


def write_json(path: Path | None, content: object) -> None:
    """Write `content` as JSON to `path`, unless `path` is None."""
    if path is not None:
        write_whole(path, json.dumps(content, indent=2) + "\n")
