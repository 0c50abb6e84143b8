"""Throughput of a run, and two causes of slowdowns: stragglers and garbage collection.

By default, Python's garbage collector runs after a certain number of allocations. If ranks
collected garbage at different steps, all other ranks would wait each time. This module makes all
ranks collect garbage at the same steps.
"""

import contextlib
import gc
import socket
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from models.families import model_size
from parallel.comm.collectives import Agreement, from_all
from parallel.comm.groups import Groups
from parallel.plan.devices import peak_flops
from spectral.kernels.dispatch import device_name
from training.config import Config
from training.data.order import Progress, TrainingData


class Pace:
    """Step times since the last report, excluding pauses.

    A step takes equally long on all ranks, because they wait for each other. A rank's local time
    ends before the first all-reduce over all ranks: it covers data loading, the forward pass and
    the backward pass.
    """

    def __init__(self, config: Config, groups: Groups, data: TrainingData) -> None:
        self.config = config
        self.groups = groups
        self.agreement = Agreement(groups.host)
        self.data = data
        self.peak_flops = peak_flops(device_name(groups.device))
        self.clock = Clock(groups.device)
        """Clock that measures this rank's local times."""
        hosts_and_stages = from_all((socket.gethostname(), groups.pipeline.rank))
        hosts, stages = zip(*hosts_and_stages, strict=True)
        self._stragglers = Stragglers(hosts, stages)
        self.stragglers: list[str] = []
        """Messages about new stragglers found by the last call to `figures`."""
        self.restart(Progress())

    def restart(self, progress: Progress) -> None:
        """Start timing the steps after `progress`."""
        self._mark = time.perf_counter()
        self._marked = progress.step, progress.tokens

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager to exclude a block of code from the step time."""
        began = time.perf_counter()
        yield
        self._mark += time.perf_counter() - began

    def figures(self, progress: Progress) -> dict[str, float]:
        """Return the throughput since the last call, the peak memory and the remaining time.

        Synchronizes with the device and all ranks.
        """
        train, (step, tokens) = self.config.train, self._marked
        count, read = progress.step - step, progress.tokens - tokens
        seconds = (time.perf_counter() - self._mark) / count
        local_seconds = self.clock.total() / count
        attended = self.data.at(step).attended_length()
        metrics = performance(
            tokens=read / count,
            seconds=seconds,
            devices=dist.get_world_size(),
            flops_per_token=model_size(self.config.model, attended).flops_per_token,
            peak=self.peak_flops,
        )
        times = self.agreement.gather([local_seconds])[:, 0]
        self.stragglers = list(self._stragglers.new(times.tolist(), count))
        ahead = train.samples(progress.step, progress.tokens, train.last) * train.sequence_length
        metrics["progress/pct"] = 100.0 * progress.step / train.steps
        metrics["progress/eta_s"] = ahead / read * count * seconds
        if self.groups.device.type == "cuda":
            metrics["mem/max_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            metrics["mem/max_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self.restart(progress)
        return metrics


def performance(
    *, tokens: float, seconds: float, devices: int, flops_per_token: float, peak: float | None
) -> dict[str, float]:
    """Return the `perf/` metrics. The arguments are values of one step, or means over several
    steps.

    tokens           tokens per step across all devices
    seconds          seconds per step
    flops_per_token  forward and backward FLOPs, excluding recomputation
    peak             peak FLOP/s of one device; None omits `perf/mfu`
    """
    rate = tokens / seconds
    achieved = rate * flops_per_token / devices
    metrics = {
        "perf/tokens_per_sec": rate,
        "perf/tokens_per_sec_per_gpu": rate / devices,
        "perf/step_time_s": seconds,
        "perf/tflops_per_gpu": achieved / 1e12,
    }
    return metrics if peak is None else metrics | {"perf/mfu": 100 * achieved / peak}


class Clock:
    """Adds up time intervals measured on the device. Only `total` waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._intervals: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        """Start an interval."""
        if self.cuda:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            self._intervals.append(pair)
        else:
            self._began = time.perf_counter()

    def end(self) -> None:
        """End the interval."""
        if self.cuda:
            self._intervals[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def total(self) -> float:
        """Return the total time in seconds of all intervals since the last call. Waits for the
        device."""
        for begin, end in self._intervals:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._intervals.clear()
        total, self._seconds = self._seconds, 0.0
        return total


RATIO: Final = 1.2
"""A rank is slow if its local time exceeds this factor times the median local time of its pipeline
stage."""

STEPS: Final = 50
"""Number of consecutive slow steps after which a rank is reported as a straggler."""


class Stragglers:
    """Counts consecutive slow steps on each rank.

    The ranks of a tensor-parallel group or pipeline wait for each other during forward and backward
    passes, so they all become slow together.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int]) -> None:
        """`hosts` and `stages` are the host names and pipeline stages of all ranks."""
        self.hosts = hosts
        self.stages = stages
        self._slow = [0] * len(hosts)

    def new(self, seconds: Sequence[float], steps: int) -> Iterator[str]:
        """Yield a message for each rank that has become a straggler.

        seconds  mean local time per step of each rank over the last `steps` steps
        steps    number of steps since the last call
        """
        medians = {}
        for stage in set(self.stages):
            in_stage = [s for s, other in zip(seconds, self.stages, strict=True) if other == stage]
            medians[stage] = median(in_stage)
        for rank, (local, stage) in enumerate(zip(seconds, self.stages, strict=True)):
            before = self._slow[rank]
            self._slow[rank] = before + steps if local > RATIO * medians[stage] else 0
            if before < STEPS <= self._slow[rank]:
                yield (
                    f"rank {rank} (host {self.hosts[rank]}) has been slow for {self._slow[rank]} "
                    f"steps: {local:.3g} s per step before waiting for other ranks; the median of "
                    f"its pipeline stage is {medians[stage]:.3g} s"
                )


INTERVAL: Final = 10
"""Number of steps between garbage collections."""


@contextlib.contextmanager
def collected_at_steps() -> Iterator[None]:
    """Context manager in which only `collect` collects garbage, and only among new objects.

    If some objects are already frozen, the context manager does not freeze or unfreeze objects.
    """
    automatic, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    if not frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if automatic:
            gc.enable()


def collect(step: int) -> None:
    """Collect garbage if `step` is a multiple of `INTERVAL`."""
    if step % INTERVAL == 0:
        gc.collect()
