"""How fast the run is, and which rank holds it up."""

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.agreement import Agreement
from parallel.comm.groups import Groups
from training.config import Config
from training.report.metrics import performance


class Pace:
    """Times of the steps since the last report, pauses left out.

    All ranks take the same time for a step, as they wait for each other. A rank's own work is what
    lies before the first figure that all ranks share: reading data, forward and backward.
    """

    def __init__(
        self, config: Config, groups: Groups, *, flops_per_token: float, peak_flops: float | None
    ) -> None:
        self.config = config
        self.groups = groups
        self.agreement = Agreement(groups.host)
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._clock = Clock(groups.device)
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from now, after `step`."""
        self._mark = time.perf_counter()
        self._marked_step = step

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose time is no step's."""
        began = time.perf_counter()
        yield
        self._mark += time.perf_counter() - began

    def start_local_timer(self) -> None:
        """None; a step begins on this rank."""
        self._clock.begin()

    def stop_local_timer(self) -> None:
        """None; from here on this step waits for others."""
        self._clock.end()

    def figures(self, step: int) -> dict[str, float]:
        """Throughput, memory and spread over ranks of the steps since the last call. Waits for the
        device and all ranks."""
        train, count = self.config.train, step - self._marked_step
        seconds = (time.perf_counter() - self._mark) / count
        own = self._clock.total() / count
        metrics = performance(
            tokens=train.global_batch * train.sequence_length,
            seconds=seconds,
            devices=dist.get_world_size(),
            flops_per_token=self.flops_per_token,
            peak=self.peak_flops,
        )
        metrics |= spread(self.agreement.gather([seconds, own]))
        metrics["progress/pct"] = 100.0 * step / train.steps
        metrics["progress/eta_s"] = (train.steps - step) * seconds
        if self.groups.device.type == "cuda":
            metrics["mem/max_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            metrics["mem/max_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self.restart(step)
        return metrics


def spread(times: Tensor) -> dict[str, float]:
    """Smallest, median and largest over ranks of the step time and of a rank's own work, from times
    in seconds `[ranks, 2]`, and the rank whose own work takes longest."""
    found: dict[str, float] = {}
    for name, column in (("step_time", times[:, 0]), ("own_time", times[:, 1])):
        found[f"perf/{name}_min_s"] = column.min().item()
        found[f"perf/{name}_median_s"] = column.quantile(0.5).item()
        found[f"perf/{name}_max_s"] = column.max().item()
    return found | {"perf/slowest_rank": float(times[:, 1].argmax())}


class Clock:
    """Sums up times on the device, on a GPU without waiting for it until the sum is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        """None; a span begins."""
        if self.cuda:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            self._spans.append(pair)
        else:
            self._began = time.perf_counter()

    def end(self) -> None:
        """None; the span ends."""
        if self.cuda:
            self._spans[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def total(self) -> float:
        """Seconds of all spans since the last call; waits for the device."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._spans.clear()
        total, self._seconds = self._seconds, 0.0
        return total
