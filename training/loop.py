"""The training loop: step, guard, log, validate."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import all_reduce_
from parallel.groups import Groups
from parallel.model import LossFunction, ParallelModel
from parallel.optimizer import DistributedOptimizer, GradientNorm
from training.assignments import GROUPS
from training.config import Config
from training.data import ValidationData
from training.evaluate import as_batch, evaluate
from training.expert_balance import ExpertBalance
from training.guard import NonFiniteGuard
from training.metrics import performance
from training.schedule import learning_rate_factor
from training.spectral_metrics import SpectralMetrics


@dataclass(frozen=True)
class StepResult:
    """Device tensors of one step: mean loss, gradient norm, and whether the step was taken."""

    loss: Tensor
    norm: GradientNorm
    active: Tensor


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last step taken (counted from 1) and the last validation's metrics."""

    step: int
    validation: dict[str, float]


class Trainer:
    """One rank's training loop over a built model, optimizer and data."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        model: ParallelModel,
        optimizer: DistributedOptimizer,
        batches: Iterator[Tensor],
        validation: Sequence[ValidationData],
        report: Callable[[dict[str, Any], int], None],
        *,
        flops_per_token: float,
        peak_flops: float | None,
        on_step: Callable[[int, StepResult], None] | None = None,
    ) -> None:
        """`batches` yields this rank's micro-batches `[micro_batch, sequence_length + 1]`;
        `report(metrics, step)` is called once per logging or validation step, on every rank with
        the same metrics; `peak_flops` is one device's peak (FLOP/s), None if unknown; `on_step`
        sees every step's result."""
        self.config = config
        self.groups = groups
        self.model = model
        self.optimizer = optimizer
        self.batches = batches
        self.validation = validation
        self.report = report
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.on_step = on_step
        self.spectral = SpectralMetrics(optimizer, groups)
        self.experts = ExpertBalance(model, groups, config.model)
        self.guard = NonFiniteGuard(
            limit=config.train.max_skipped_steps, global_batch=config.train.global_batch
        )

    @property
    def microbatches(self) -> int:
        """Micro-batches per step on this rank."""
        train = self.config.train
        return train.global_batch // (train.micro_batch * self.groups.data.size)

    def run(self) -> Outcome:
        """Trains to `train.exit_step` (or `train.steps`) and validates at the end.

        Raises NonFiniteError after too many skipped steps in a row.
        """
        config, last = self.config, self.config.train.exit_step or self.config.train.steps
        validation: dict[str, float] = {}
        mark, marked_step = time.perf_counter(), 0
        for step in range(1, last + 1):
            result = self.step(step - 1)
            self.guard.record(step, result.active)
            self.spectral.record()
            if self.on_step is not None:
                self.on_step(step, result)
            metrics: dict[str, Any] = {}
            if step % config.log.interval == 0 or step == last:
                self.guard.check()
                metrics |= self.figures(step, result)
                now = time.perf_counter()
                metrics |= self.speed(step, (now - mark) / (step - marked_step))
                mark, marked_step = now, step
            if self.validation and self.validates(step, last):
                began = time.perf_counter()
                validation = evaluate(
                    self.model,
                    self.groups,
                    self.validation,
                    micro_batch=config.train.micro_batch,
                )
                metrics |= validation
                mark += time.perf_counter() - began
            if metrics:
                self.report(metrics, step)
        return Outcome(last, validation)

    def validates(self, step: int, last: int) -> bool:
        """Whether the run is validated after `step`."""
        interval = self.config.validation.interval
        return step == last or (interval > 0 and step % interval == 0)

    def step(self, index: int) -> StepResult:
        """One optimizer step, `index` counted from 0. Nothing here waits for the device."""
        train = self.config.train
        windows = [next(self.batches) for _ in range(self.microbatches)]
        batches = [as_batch(window, self.groups) for window in windows]
        self.model.zero_gradients()
        figures = self.model.run(
            lambda: iter(batches),
            mean_loss,
            microbatches=self.microbatches,
            micro_batch=train.micro_batch,
            train=True,
        )
        loss = self.mean_over_ranks(figures)
        clip = self.config.optimizer.clip
        norm = self.optimizer.clip(clip.max_norm, clip.whole_matrix_roles)
        active = torch.isfinite(loss) & torch.isfinite(norm.total)
        factor = learning_rate_factor(index, train.steps, self.config.schedule)
        self.optimizer.step(torch.full((), factor, device=self.groups.device), active)
        self.experts.step(active)
        return StepResult(loss, norm, active)

    def mean_over_ranks(self, figures: list[dict[str, Tensor]]) -> Tensor:
        """Mean loss of the global batch on every rank; `figures` is empty off the last stage."""
        total = torch.zeros((), device=self.groups.device)
        for figure in figures:
            total = total + figure["loss"] / self.microbatches
        replicas = self.groups.dense.replicas
        all_reduce_(total, replicas, self.model.traffic, "mean loss")
        all_reduce_(total, self.groups.pipeline, self.model.traffic, "mean loss")
        return total / replicas.size

    def figures(self, step: int, result: StepResult) -> dict[str, Any]:
        """The metrics that are a pure function of the step. Waits for the device."""
        train = self.config.train
        factor = learning_rate_factor(step - 1, train.steps, self.config.schedule)
        optimizer = self.config.optimizer
        rates = {f"lr/{group}": getattr(optimizer, group).lr * factor for group in GROUPS}
        return {
            "train/loss": result.loss.item(),
            **rates,
            "optim/grad_norm": result.norm.total.item(),
            "optim/clip_coef": result.norm.coefficient.item(),
            "optim/skipped_steps": self.guard.skipped,
            "progress/tokens": step * train.global_batch * train.sequence_length,
            **self.spectral.summary(),
            **self.experts.metrics(),
        }

    def speed(self, step: int, seconds: float) -> dict[str, Any]:
        """Throughput and memory figures of steps that took `seconds` on average."""
        train = self.config.train
        metrics = performance(
            tokens=train.global_batch * train.sequence_length,
            seconds=seconds,
            devices=dist.get_world_size(),
            flops_per_token=self.flops_per_token,
            peak=self.peak_flops,
        )
        metrics["progress/pct"] = 100.0 * step / train.steps
        metrics["progress/eta_s"] = (train.steps - step) * seconds
        if self.groups.device.type == "cuda":
            metrics["mem/max_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            metrics["mem/max_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return metrics


def mean_loss(batch: dict[str, Tensor]) -> LossFunction:
    """Loss function of training: the mean token loss of the micro-batch."""

    def loss(token_losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = token_losses.float().mean()
        # The schedule divides the loss in place, so the figure is a copy.
        return mean, {"loss": mean.detach().clone()}

    return loss


def unigram_comparison(
    validation: Sequence[ValidationData], metrics: dict[str, float]
) -> list[tuple[str, float, float]]:
    """(set, validation loss, unigram entropy of the set's text), both in nats per token."""
    return [
        (each.name, metrics.get(f"val/{each.name}/loss", math.nan), each.set.unigram_entropy())
        for each in validation
    ]
