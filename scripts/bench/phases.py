"""Times of the phases of a training step, taken on the real trainer from outside."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from training.loop import Trainer

PHASES: Final = (
    "data", "forward", "backward", "gradient reduction", "clip", "optimizer", "wait for weights",
    "logging", "other",
)  # fmt: skip
"""Each moment of a step belongs to one. Reduction and weights count as far as the step waits for
them; backward is what Megatron's schedule does beside forward; recomputation is part of it."""


class Phases:
    """Marks the moment at which a phase begins: on a GPU an event, which waits for nothing, on a
    CPU the clock. Phases may lie in one another; time belongs to the innermost."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._open = ["other"]
        self._marks: list[tuple[Any, str]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose time is of phase `name`."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def restart(self) -> None:
        """Forget what was timed, and times from here."""
        self._marks.clear()
        self._mark()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since `restart`; waits for the device."""
        self._mark()
        if self.cuda:
            torch.cuda.synchronize()
        totals = dict.fromkeys(PHASES, 0.0)
        for (begin, name), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            totals[name] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return totals

    def _mark(self) -> None:
        if not self.cuda:
            self._marks.append((time.perf_counter(), self._open[-1]))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, self._open[-1]))


def watch(trainer: Trainer, phases: Phases) -> None:
    """None; from now on `phases` sees where the trainer's steps spend their time."""
    model, optimizer = trainer.model, trainer.optimizer
    places: list[tuple[Any, str, str]] = [
        (model, "forward_backward", "backward"),
        (model, "finish_gradients", "gradient reduction"),
        (optimizer, "clip", "clip"),
        (optimizer, "step", "optimizer"),
        (trainer, "figures", "logging"),
        (trainer.pace, "figures", "logging"),
        (trainer, "report", "logging"),
        (trainer.monitors, "take", "logging"),
        *((domain, "wait", "wait for weights") for domain in model.domains),
        *((chunk, "forward", "forward") for chunk in model.chunks),
    ]
    for holder, name, phase in places:
        setattr(holder, name, partial(_within, phases, phase, getattr(holder, name)))
    trainer.batches = _timed(trainer.batches, phases)


def _within(phases: Phases, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with phases.phase(name):
        return call(*args, **options)


def _timed(batches: Iterator[torch.Tensor], phases: Phases) -> Iterator[torch.Tensor]:
    while True:
        with phases.phase("data"):
            batch = next(batches)
        yield batch


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each phase's share of the whole."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def mean(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The mean over ranks of each phase."""
    sums: dict[str, float] = defaultdict(float)
    for times in ranks:
        for name, value in times.items():
            sums[name] += value / len(ranks)
    return dict(sums)
