"""Clocks: events and wall time on a GPU, processor time of this process on a CPU.

Other work on the machine disturbs processor time less than wall time.
"""

import statistics
import time
from collections.abc import Callable

import torch

FLUSHED_BYTES = 1 << 28
"""Written between two calls on a GPU: several times its second-level cache."""

Call = Callable[[], object]


def now(device: torch.device) -> float:
    """Seconds on a clock; only differences have a meaning.

    Wall time on a GPU, after its work is done, and processor time of this process on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def timed(call: Call, device: torch.device, before: Call = lambda: None) -> tuple[float, float]:
    """Time one call: milliseconds until it is done, and until it returned to the host.

    On a GPU the first is measured by events, and `before` runs just ahead of them; on a CPU both
    are processor time.
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
    """Median milliseconds of a call with a cold cache, after one that compiles and warms up."""
    call()
    # Work in the queue, so that the host has launched the call before the device gets to it.
    size = FLUSHED_BYTES if device.type == "cuda" else 0
    scratch = torch.empty(size, dtype=torch.int8, device=device)
    return statistics.median(timed(call, device, scratch.zero_)[0] for _ in range(repeats))
