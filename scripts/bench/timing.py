"""The time of a call, by the events of a GPU or by the clock."""

import statistics
import time
from collections.abc import Callable

import torch

FLUSHED_BYTES = 1 << 28
"""Written between two calls on a GPU: several times its second-level cache."""


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call; one more, before, compiles and warms up."""
    call()
    if device.type != "cuda":
        return statistics.median(1e3 * _clocked(call) for _ in range(repeats))
    scratch = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _clocked(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
