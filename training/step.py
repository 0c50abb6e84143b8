"""Training step: forward and backward passes, monitors, penalty, guards and optimizer update.

`Trainer` holds one rank's model, optimizer, data and progress. Logging, validation and saving
between steps are in loop.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, profiler

from parallel.comm.collectives import all_reduce_
from parallel.comm.groups import Groups
from parallel.model import Batch, LossFunction, ParallelModel
from parallel.observe.weight_watch import WeightWatch
from parallel.optimizer.distributed_optimizer import (
    CapturedUpdate,
    DistributedOptimizer,
    GradientNorm,
    Update,
)
from parallel.optimizer.penalty_gradient import PenaltyFigures
from spectral.ieee_products import ieee_products
from training.config import Config
from training.config.optimizer_section import groups_of
from training.config.schedule import step_factor
from training.config.schema import GramPenaltyConfig
from training.data.batches import as_batch, training_batches
from training.data.order import Progress, SetCount, TrainingData, Windows
from training.data.tasks import Task
from training.data.validation_data import ValidationData
from training.lifecycle.pace import Pace
from training.monitor.expert_balance import ExpertBalance
from training.monitor.monitors import Monitors
from training.monitor.spectral_metrics import SpectralMetrics
from training.nonfinite import NonFiniteGuard, SpikeDetector
from training.samples import build_sampler


@dataclass(frozen=True)
class StepResult:
    """Results of a step, as tensors on the device.

    loss    mean loss
    norm    gradient norm
    active  True if the step was taken, False if it was skipped
    z_loss  mean squared log-sum-exp of the logits, or None if the z-loss is off
    """

    loss: Tensor
    norm: GradientNorm
    active: Tensor
    z_loss: Tensor | None


class Trainer:
    """Runs the training steps on one rank, given its model, optimizer and data."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        model: ParallelModel,
        optimizer: DistributedOptimizer,
        data: TrainingData,
        validation: Sequence[ValidationData],
        *,
        tasks: Sequence[Task],
        monitor_interval: int | None,
    ) -> None:
        """Build all other objects that a step needs.

        data       training data; checkpoints store the number of samples read from each set
        tasks      multiple-choice tasks on which the model is evaluated
        monitor_interval   monitor interval in steps
        """
        self.config = config
        self.groups = groups
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.make_batches = partial(training_batches, config, groups, data)
        self.validation = validation
        self.tasks = tasks
        self.sampler = build_sampler(config, validation)
        kind = CapturedUpdate if config.optimizer.distributed.cuda_graph else Update
        self.update = kind(optimizer, max_norm=config.optimizer.clip.max_norm)
        self.progress = Progress()
        self.tokens_before = 0
        """Number of target tokens in all steps before the current step."""
        self.read_on()
        self.pace = Pace(config, groups, data)
        model.after_backward = self.pace.clock.end
        self.spectral = SpectralMetrics(optimizer, groups, preconditioned=config.pc is not None)
        self.experts = ExpertBalance(model, groups, config.model)
        self.monitors = Monitors(config, groups, model, optimizer, self.experts, monitor_interval)
        section = config.gram_penalty
        self.penalty = None if section is None else GramPenalty(section, config, optimizer)
        watched = config.watchdog.replica_interval > 0
        self.weights = WeightWatch(optimizer) if watched else None
        self.spikes = SpikeDetector(config.spikes.deviations, config.spikes.window, groups.device)
        self.guard = NonFiniteGuard(
            limit=config.train.max_skipped_steps, spikes=config.spikes.deviations is not None
        )

    @property
    def microbatches(self) -> int:
        """Number of micro-batches per rank in the current step."""
        return self.batch // (self.config.train.micro_batch * self.groups.data.size)

    def read_on(self) -> None:
        """Continue reading data from the current progress, with the next step's batch size."""
        self.batch = self.config.train.batch(self.progress.step, self.progress.tokens)
        self.batches = self.make_batches(self.progress)

    def step(self, index: int) -> StepResult:
        """Take optimizer step `index`, counted from 0.

        Only steps that run monitors or report the Gram penalty synchronize with the device.
        """
        with profiler.record_function("forward_backward"):
            means = self.compute_gradients(index)
            loss, z_loss = (means, None) if means.ndim == 0 else means.unbind()
        # The user's float32 matmul precision applies to the forward pass only.
        with ieee_products():
            with profiler.record_function("monitors"):
                self.monitors.after_backward()
            with profiler.record_function("optimizer"):
                if self.weights is not None:
                    self.weights.compare()
                if self.penalty is not None:
                    self.penalty.add(index)
                factor = self.rate_factor(index)
                usable = (loss.abs() < math.inf) & self.spikes.is_not_spike(loss)
                norm = self.update(factor, usable)
                active = norm.active
                self.spikes.record(loss, active)
                self.experts.step(active)
                if self.weights is not None:
                    self.weights.note()
            with profiler.record_function("monitors"):
                self.monitors.after_step(factor, active)
        return StepResult(loss, norm, active, z_loss)

    def rate_factor(self, index: int) -> float:
        """Return the learning-rate factor for step `index`, counted from 0."""
        return step_factor(index, self.tokens_before, self.config.train, self.config.schedule)

    def compute_gradients(self, index: int) -> Tensor:
        """Compute the gradient shards. Return the metrics of `mean_loss`, averaged over the global
        batch."""
        self.pace.clock.begin()
        windows = [next(self.batches) for _ in range(self.microbatches)]
        batches = [as_batch(window, self.groups, self.data.borders) for window in windows]
        if not self.data.borders.first_token_loss:
            self.weigh(batches)
        self.model.zero_gradients()
        with profiler.record_function("monitors"):
            self.monitors.before(index + 1, self.microbatches)
        figures = self.model.forward_backward(
            lambda: iter(batches),
            partial(mean_loss, z_loss=self.config.train.z_loss),
            microbatches=self.microbatches,
            micro_batch=self.config.train.micro_batch,
            train=True,
        )
        return self.mean_over_ranks(figures)

    def weigh(self, batches: Sequence[Batch]) -> None:
        """Set weights so that all labels of the step that contribute to the loss have equal weight.

        The average of the weighted sums over micro-batches and ranks is then the mean over these
        labels.
        """
        replicas = self.groups.dense.replicas
        counts = torch.stack([batch["counted"].sum() for batch in batches])
        total = all_reduce_(counts.sum(), replicas, self.model.comm_volume, "counted tokens")
        for batch in batches:
            batch["weights"] = batch["counted"] * (len(batches) * replicas.size / total)

    def mean_over_ranks(self, figures: list[dict[str, Tensor]]) -> Tensor:
        """Average the metrics of `mean_loss` over the global batch, and return them on all ranks.

        `figures` contains the metrics of each micro-batch on the last pipeline stage, and is empty
        on other stages.
        """
        shape = (2,) if self.config.train.z_loss else ()
        total = torch.zeros(shape, device=self.groups.device)
        for figure in figures:
            total = total + figure["loss"] / self.microbatches
        replicas = self.groups.dense.replicas
        all_reduce_(total, replicas, self.model.comm_volume, "mean loss")
        all_reduce_(total, self.groups.pipeline, self.model.comm_volume, "mean loss")
        return total / replicas.size

    def figures(self, step: int, result: StepResult) -> dict[str, Any]:
        """Return the metrics of a logged step, without timings. Synchronizes with the device."""
        factor, optimizer = self.rate_factor(step - 1), self.config.optimizer
        groups = groups_of(self.config.model)
        rates = {f"lr/{group}": getattr(optimizer, group).lr * factor for group in groups}
        counts = self.read() if self.config.data.phases else {}
        return {
            "train/loss": result.loss.item(),
            **({} if result.z_loss is None else {"train/z_loss": result.z_loss.item()}),
            **rates,
            "optim/grad_norm": result.norm.total.item(),
            "optim/clip_coef": result.norm.coefficient.item(),
            "optim/skipped_steps": self.guard.skipped,
            **self.spectral.summary(),
            **self.experts.metrics(self.microbatches),
            **{f"data/{name}/tokens": count.tokens for name, count in counts.items()},
        }

    def checkpoint(self) -> dict[str, Any]:
        """Return the trainer's non-tensor state as values that can be written to JSON. Synchronizes
        with the device.

        Raises DisagreementError if watched weights have changed between steps.
        """
        if self.weights is not None:
            self.weights.check()
        return {
            "step": self.progress.step,
            "progress": asdict(replace(self.progress, read=self.read())),
            "trainer": {
                "guard": self.guard.state(),
                "spikes": self.spikes.losses.tolist() if self.spikes.deviations else [],
                "spectral": self.spectral.state(),
            },
        }

    def read(self) -> dict[str, SetCount]:
        """Return the numbers of samples and tokens that the run has read from each set."""
        return self.present.read(self.progress.sample)

    @property
    def present(self) -> TrainingData:
        """Training data of the current phase."""
        return self.data.at(self.progress.step).since(self.progress.phase)

    def restore(self, progress: Progress, state: Mapping[str, Any]) -> None:
        """Resume from `progress` and `state`, the entries "progress" and "trainer" of the dict that
        `checkpoint` returned."""
        self.progress = progress
        self.read_on()
        self.guard.restore(state["guard"])
        self.spikes.restore(state["spikes"])
        self.spectral.restore(state["spectral"])
        self.monitors.forget()
        if self.weights is not None:
            self.weights.forget()

    def leave_out(self, windows: Windows) -> None:
        """Skip the samples in `windows` from now on."""
        self.progress.left_out = windows
        self.read_on()


def mean_loss(batch: Batch, z_loss: float = 0.0) -> LossFunction:
    """Return the training loss function.

    The loss is the mean token loss over the micro-batch plus `z_loss` times the mean squared
    log-sum-exp of the logits. If the batch contains `weights`, weighted sums replace both means.
    The metric `loss` is the mean loss `[]`. With a z-loss, the metric contains both means `[2]`;
    the second mean is not multiplied by `z_loss`.
    """
    weights = batch.get("weights")

    def mean(each: Tensor) -> Tensor:
        return each.float().mean() if weights is None else (each.float() * weights).sum()

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if not z_loss:
            value = mean(output)
            # Clone, because Megatron's schedule divides the loss in place.
            return value, {"loss": value.detach().clone()}
        means = torch.stack([mean(each) for each in output])
        return means[0] + z_loss * means[1], {"loss": means.detach().clone()}

    return loss


class GramPenalty:
    """Adds the gradient of the Gram penalty to the gradient of the loss while the penalty is
    active.

    Source: "Learning in Transformers under Spectral Constraints", section 6. In the paper, the
    penalty is active during the first tenth of training.
    """

    def __init__(
        self, section: GramPenaltyConfig, config: Config, optimizer: DistributedOptimizer
    ) -> None:
        self.optimizer = optimizer
        self.horizon = max(1, round(section.horizon * config.train.steps))  # last active step
        self.log_interval = config.log.interval
        self.last = config.train.last
        self._figures: PenaltyFigures | None = None

    def reports(self, step: int) -> bool:
        """Return whether the penalty's metrics are logged after `step`, counted from 1.

        The metrics are logged at logging steps and also after the first step, which helps to choose
        the coefficient.
        """
        return step == 1 or step % self.log_interval == 0 or step == self.last

    def add(self, index: int) -> None:
        """Add the penalty's gradient if the penalty is active in step `index`, counted from 0.

        Synchronizes with the device only in steps whose metrics are logged.
        """
        self._active, measured = index < self.horizon, self.reports(index + 1)
        self._figures = None
        if self._active or measured:
            self._figures = self.optimizer.add_penalty(enabled=self._active, measured=measured)

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the penalty's metrics for the last step, computed from the weights before that
        step. `loss` is the mean loss of that step.

        penalty/on              1 if the penalty was active, else 0
        penalty/value           coefficient times the summed penalties, whether active or not
        penalty/loss_ratio      penalty/value divided by the loss
        penalty/gradient_ratio  gradient norm of the penalty divided by the gradient norm of the
                                loss, both over penalised weights
        penalty/share           mean of ||OffDiag||_F^2 / ||W||_F^4
        """
        figures = self._figures
        if figures is None:
            return {}
        loss_norm = figures.loss_gradient_norm
        return {
            "penalty/on": float(self._active),
            "penalty/value": figures.value,
            "penalty/loss_ratio": figures.value / loss if loss else math.nan,
            "penalty/gradient_ratio": figures.gradient_norm / loss_norm if loss_norm else math.nan,
            "penalty/share": figures.share,
        }
