"""Training loop: steps, logging, validation, checkpoints, stops and rewinds."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import profiler

from spectral.ieee_products import ieee_products
from training.evaluation import Interrupted, evaluate, score
from training.lifecycle.lifecycle import NoLifecycle
from training.lifecycle.pace import collect
from training.nonfinite import NonFiniteError
from training.step import StepResult, Trainer
from training.step_profile import StepProfile


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    step        last step taken, counted from 1
    validation  metrics from the last validation
    stopped     reason why the run ended before its last step, or None
    """

    step: int
    validation: dict[str, float]
    stopped: str | None = None


def ignore(*_: object) -> None:
    """No-op."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Optional hooks of the training loop. Without hooks, the loop only trains.

    report     called with metrics, which are identical on all ranks, and the step
    record     called with the monitors' metrics and the step
    note       called with the kind, step and text of an event
    on_step    called with the number and result of each step
    rewind     called with an error; rewinds to a checkpoint and returns whether it succeeded
    lifecycle  saves checkpoints and handles stop requests
    """

    report: Callable[[dict[str, Any], int], None] = ignore
    record: Callable[[dict[str, Any], int], None] = ignore
    note: Callable[[str, int, str], None] = ignore
    on_step: Callable[[int, StepResult], None] = ignore
    rewind: Callable[[NonFiniteError], bool] = lambda error: False
    lifecycle: NoLifecycle = NoLifecycle()


NO_HOOKS = Hooks()


class Loop:
    """Training loop of one rank: runs the trainer's steps and, after each step, the work that is
    due.

    Attributes:
        validation: metrics of the last validation.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks = NO_HOOKS) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.hooks = hooks
        self.profile = StepProfile(
            trainer.config, trainer.groups, trainer.progress.step, hooks.note
        )
        self.validation: dict[str, float] = {}

    def run(self) -> Outcome:
        """Train from the current step to the last, validate, and return the outcome.

        After too many consecutive skipped steps, rewind the run. Raises NonFiniteError if the run
        cannot be rewound, and CheckpointError if a checkpoint cannot be written.
        """
        with contextlib.closing(self.profile):
            while True:
                try:
                    return self.run_until_stopped()
                except NonFiniteError as error:
                    if not self.hooks.rewind(error):
                        raise

    def run_until_stopped(self) -> Outcome:
        """Train until the last step or until a stop is requested, then save."""
        trainer, lifecycle, last = self.trainer, self.hooks.lifecycle, self.config.train.last
        progress = trainer.progress
        trainer.pace.restart(progress)
        if progress.unreported:  # a stop request interrupted the validation after the last step
            self.validate_and_report(
                {name: value for name, value in progress.unreported.items() if name != "due"}
            )
        while progress.step < last and lifecycle.reason is None:
            self.step_and_report()
            lifecycle.save_if_due(progress.step, trainer.checkpoint)
        self.profile.finish(progress.step)
        lifecycle.save_last(trainer.checkpoint)
        finished = progress.step >= last and not progress.unreported
        return Outcome(progress.step, self.validation, None if finished else lifecycle.reason)

    def step_and_report(self) -> None:
        """Take the next step, then validate and report metrics if either is due."""
        trainer, hooks, progress = self.trainer, self.hooks, self.trainer.progress
        self._begin_ramp_stage()
        trainer.tokens_before = progress.tokens
        samples = progress.advance(trainer.batch, self.config.train.sequence_length)
        step = progress.step
        self.profile.before(step)
        result = trainer.step(step - 1)
        with trainer.pace.pause():
            self.profile.after(step)
        collect(step)
        self._begin_data_phase()
        trainer.guard.record(step, samples, result.active)
        trainer.spectral.record(result.active)
        hooks.on_step(step, result)
        hooks.lifecycle.after_step(step)
        with ieee_products():
            metrics = self.due_figures(step, samples, result)
        self.validate_and_report(metrics)

    def _begin_ramp_stage(self) -> None:
        """If the next step starts a stage of the batch ramp, change the batch size."""
        trainer, progress = self.trainer, self.trainer.progress
        if self.config.train.batch(progress.step, progress.tokens) != trainer.batch:
            trainer.read_on()
            text = f"batch: {trainer.batch:,} sequences per step from step {progress.step + 1:,} on"
            self.hooks.note("batch", progress.step, f"{text}, after {progress.tokens:,} tokens")

    def _begin_data_phase(self) -> None:
        """If the next step starts a data phase, read the training sets with the weights of that
        phase."""
        trainer, progress = self.trainer, self.trainer.progress
        before, following = trainer.data.at(progress.step - 1), trainer.data.at(progress.step)
        if following.blend is before.blend:
            return
        read = before.since(progress.phase).read(progress.sample)
        progress.phase = following.phase_after(progress.sample, read)
        trainer.read_on()
        shares = ", ".join(
            f"{name} {share:.1%} ({progress.phase.tokens(name):,} tokens read before)"
            for name, share in following.shares.items()
        )
        text = f"data from step {progress.step + 1:,} on: {shares}"
        self.hooks.note("data", progress.step, text)

    def due_figures(
        self, step: int, samples: tuple[int, int], result: StepResult
    ) -> dict[str, Any]:
        """Return the metrics due after `step`. `samples` is the sample range [first, end) that the
        step used.

        Also record the monitors' metrics, and check weights and losses.
        """
        trainer, hooks = self.trainer, self.hooks
        metrics: dict[str, Any] = {}
        if self.due(self.config.log.interval, step):
            trainer.guard.check()
            metrics |= trainer.figures(step, result) | trainer.pace.figures(trainer.progress)
            for text in trainer.pace.stragglers:
                hooks.note("straggler", step, text)
            trainer.guard.check_unit(*trainer.spectral.refusals.worst, step, samples)
        if trainer.weights is not None and step % self.config.watchdog.replica_interval == 0:
            trainer.weights.check()
        line, aggregates = trainer.monitors.take(step, trainer.progress.tokens)
        if line:
            hooks.record(line, step)
        metrics |= aggregates
        if trainer.penalty is not None and trainer.penalty.reports(step):
            metrics |= trainer.penalty.metrics(result.loss.item())
        return metrics

    def validate_and_report(self, metrics: dict[str, Any]) -> None:
        """Run the evaluations that are due, and report `metrics` and the evaluations' metrics.

        If a stop request interrupts an evaluation, `metrics` are stored and reported when the run
        resumes.
        """
        progress, measured = self.trainer.progress, dict(metrics)
        progress.unreported = {}
        try:
            for evaluation in self.due_evaluations():
                with self.trainer.pace.pause(), profiler.record_function("validation"):
                    measured |= evaluation()
        except Interrupted:
            progress.unreported = {**metrics, "due": True}
            return
        if measured:
            self.hooks.report({**measured, "progress/tokens": progress.tokens}, progress.step)

    def due_evaluations(self) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Yield the functions that measure the model after the current step."""
        trainer, config = self.trainer, self.config
        if trainer.validation and self.due(config.validation.interval, trainer.progress.step):
            yield self.evaluate
        if trainer.tasks and self.due(config.tasks.interval, trainer.progress.step):
            yield self.score
        interval = config.validation.samples_interval
        if trainer.sampler is not None and self.due(interval, trainer.progress.step):
            beat = self.hooks.lifecycle.beat
            yield partial(trainer.sampler.sample, trainer.model, trainer.groups, beat)

    def due(self, interval: int, step: int) -> bool:
        """Return whether periodic work is due after `step`. Such work is due every `interval` steps
        (unless `interval` is 0) and after the last step."""
        return step == self.config.train.last or (interval > 0 and step % interval == 0)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all validation sets. Raises Interrupted after a stop request."""
        self.validation = evaluate(
            self.trainer.model,
            self.trainer.groups,
            self.trainer.validation,
            micro_batch=self.config.train.micro_batch,
            stop=self.hooks.lifecycle.stop_now,
            mixture={name: each.weight for name, each in self.config.data.train.items()},
        )
        return self.validation

    def score(self) -> dict[str, float]:
        """Return the metrics of all tasks. Raises Interrupted after a stop request."""
        trainer, stop = self.trainer, self.hooks.lifecycle.stop_now
        return score(trainer.model, trainer.groups, trainer.tasks, self.config, stop)
