"""Times of the phases of a training step, measured on the real trainer."""

import time
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
them. Backward is what remains of Megatron's schedule without forward, recomputation included."""


class Phases:
    """Marks the moments at which phases begin: with events on a GPU, which wait for nothing, with
    `clock` on a CPU. Phases may be nested; time belongs to the innermost."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.cuda = device.type == "cuda"
        self.clock = clock
        self._open = ["other"]
        self._marks: list[tuple[Any, str]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time of a `with` block to phase `name`."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def restart(self) -> None:
        """Forget earlier times and begin to measure."""
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
            self._marks.append((self.clock(), self._open[-1]))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, self._open[-1]))


def watch(trainer: Trainer, phases: Phases) -> None:
    """Make `phases` measure the steps of a trainer from now on."""
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
