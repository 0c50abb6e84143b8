"""Training loop: steps, logging, validation, checkpoints, stops and rewinds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import profiler

from spectral.ieee_products import ieee_products
from training.evaluation import Interrupted, evaluate, score, tokens_of_a_pass
from training.lifecycle.lifecycle import Lifecycle
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
    profile    profiles the operations in some steps
    """

    report: Callable[[dict[str, Any], int], None] = ignore
    record: Callable[[dict[str, Any], int], None] = ignore
    note: Callable[[str, int, str], None] = ignore
    on_step: Callable[[int, StepResult], None] = ignore
    rewind: Callable[[NonFiniteError], bool] = lambda error: False
    lifecycle: Lifecycle | None = None
    profile: StepProfile | None = None


NO_HOOKS = Hooks()


class Loop:
    """Training loop of one rank: runs the trainer's steps and, after each step, the work that is
    due."""

    def __init__(self, trainer: Trainer, hooks: Hooks = NO_HOOKS) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.hooks = hooks

    def run(self) -> Outcome:
        """Train from the current step to the last, validate, and return the outcome.

        After too many consecutive skipped steps, rewind the run. Raises NonFiniteError if the run
        cannot be rewound, and CheckpointError if a checkpoint cannot be written.
        """
        while True:
            try:
                return self.run_until_stopped()
            except NonFiniteError as error:
                if not self.hooks.rewind(error):
                    raise

    def run_until_stopped(self) -> Outcome:
        """Train until the last step or until a stop is requested, then save."""
        trainer, lifecycle, profile = self.trainer, self.hooks.lifecycle, self.hooks.profile
        trainer.pace.restart(trainer.progress)
        last = self.config.train.last
        # Report the metrics of the last step that the run did not report because it was stopped.
        validation: dict[str, float] | None = {}
        unreported, trainer.progress.unreported = trainer.progress.unreported, {}
        if unreported.pop("due", False):
            validation = self.validate_and_report(unreported)
        while trainer.progress.step < last and validation is not None:
            validation = self.step_and_report()
            if lifecycle is not None and lifecycle.due(trainer.progress.step):
                with profiler.record_function("checkpoint"):
                    lifecycle.save(trainer.checkpoint())
            if lifecycle is not None and lifecycle.stopping:
                break
        if profile is not None:
            profile.finish(trainer.progress.step)
        if lifecycle is not None:
            with profiler.record_function("checkpoint"):
                lifecycle.save_last(trainer.checkpoint())
        early = trainer.progress.step < last or validation is None
        reason = lifecycle.reason if lifecycle is not None and early else None
        return Outcome(trainer.progress.step, validation or {}, reason)

    def step_and_report(self) -> dict[str, float] | None:
        """Take the next step, then validate and report metrics if either is due.

        Returns the validation metrics, {} if no validation was due, or None if validation was
        interrupted by a stop request.
        """
        trainer, train, hooks = self.trainer, self.config.train, self.hooks
        progress, mixture = trainer.progress, trainer.present
        if train.batch(progress.step, progress.tokens) != trainer.batch:
            trainer.read_on()
            text = f"batch: {trainer.batch:,} sequences per step from step {progress.step + 1:,} on"
            hooks.note("batch", progress.step, f"{text}, after {progress.tokens:,} tokens")
        trainer.tokens_before = progress.tokens
        samples = progress.advance(trainer.batch, train.sequence_length)
        step = progress.step
        if hooks.profile is not None:
            hooks.profile.before(step)
        result = trainer.step(step - 1)
        if hooks.profile is not None:
            with trainer.pace.pause():
                hooks.profile.after(step)
        collect(step)
        following = trainer.data.at(step)
        if following.blend is not mixture.blend:
            read = mixture.read(progress.sample)
            progress.phase = following.phase_after(progress.sample, read)
            trainer.read_on()
            shares = ", ".join(
                f"{name} {share:.1%} ({progress.phase.tokens(name):,} tokens read before)"
                for name, share in following.shares.items()
            )
            hooks.note("data", step, f"data from step {step + 1:,} on: {shares}")
        trainer.guard.record(step, samples, result.active)
        trainer.spectral.record(result.active)
        hooks.on_step(step, result)
        if hooks.lifecycle is not None:
            hooks.lifecycle.after_step(step)
        with ieee_products():
            metrics = self.due_figures(step, samples, result)
        return self.validate_and_report(metrics)

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

    def validate_and_report(self, metrics: dict[str, Any]) -> dict[str, float] | None:
        """Validate if due, report `metrics`, and return the validation metrics. Return {} if no
        validation was due, and None if a stop request interrupted the validation."""
        trainer, config, step = self.trainer, self.config, self.trainer.progress.step
        validation: dict[str, float] = {}
        scores: dict[str, float] = {}
        samples: dict[str, str] = {}
        try:
            if trainer.validation and self.due(config.validation.interval, step):
                with trainer.pace.pause(), profiler.record_function("validation"):
                    validation = self.evaluate()
            if trainer.tasks and self.due(config.tasks.interval, step):
                with trainer.pace.pause(), profiler.record_function("validation"):
                    scores = self.score()
        except Interrupted:
            trainer.progress.unreported = {**metrics, "due": True}
            return None
        if trainer.sampler is not None and self.due(config.validation.samples_interval, step):
            with trainer.pace.pause(), profiler.record_function("validation"):
                samples = trainer.sampler.sample(trainer.model, trainer.groups, self.beat)
        if metrics or validation or scores or samples:
            seen = {"progress/tokens": trainer.progress.tokens}
            self.hooks.report({**metrics, **validation, **scores, **samples, **seen}, step)
        return validation

    def due(self, interval: int, step: int) -> bool:
        """Return whether periodic work is due after `step`. Such work is due every `interval` steps
        (unless `interval` is 0) and after the last step."""
        return step == self.config.train.last or (interval > 0 and step % interval == 0)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all validation sets. Raises Interrupted after a stop request."""
        return evaluate(
            self.trainer.model,
            self.trainer.groups,
            self.trainer.validation,
            micro_batch=self.config.train.micro_batch,
            stop=self.stop_now,
            mixture={name: each.weight for name, each in self.config.data.train.items()},
        )

    def score(self) -> dict[str, float]:
        """Return the metrics of all tasks. Raises Interrupted after a stop request."""
        groups, model, train = self.trainer.groups, self.config.model, self.config.train
        assert model.vocab_size is not None  # `with_vocabulary` has replaced null
        return score(
            self.trainer.model,
            groups,
            self.trainer.tasks,
            vocab_size=model.vocab_size,
            most_tokens=tokens_of_a_pass(train, model, groups),
            stop=self.stop_now,
        )

    def stop_now(self) -> bool:
        """Return whether a stop was requested on any rank. Collective."""
        return self.hooks.lifecycle is not None and self.hooks.lifecycle.stop_now()

    def beat(self) -> None:
        """Send a heartbeat to the watchdog, if any."""
        if self.hooks.lifecycle is not None:
            self.hooks.lifecycle.watchdog.beat(self.trainer.progress.step)
