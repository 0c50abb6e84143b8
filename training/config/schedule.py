"""Sections `train` and `schedule`: length, batches, precision and learning rate of a run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from models.section import Check, Count, Section, Whole

Batch = Annotated[int, Field(ge=1, le=1 << 24)]


class RampStage(Section):
    """A part of the run with fewer sequences per step; the first stage begins with the run, each
    other stage after the previous stage."""

    batch: Batch
    """Sequences per optimizer step, fewer than in every later stage and fewer than
    `train.global_batch`."""
    until_steps: Count | None = None
    """Last step of the stage, counted from the start of the run; null = `until_tokens` sets the
    end."""
    until_tokens: Count | None = None
    """Tokens since the start of the run; the step that reaches this number ends the stage. null =
    `until_steps` sets the end."""

    def checks(self) -> Iterator[Check]:
        """Check that exactly one limit is given."""
        limits = [limit for limit in (self.until_steps, self.until_tokens) if limit is not None]
        rule = f"or until_tokens must be given, exactly one of the two, got {len(limits)}"
        yield "until_steps", len(limits) != 1, rule

    def steps_left(self, step: int, tokens: int, sequence_length: int) -> int:
        """Return the remaining steps of this stage after `step` steps and `tokens` tokens."""
        if self.until_tokens is None:
            return max(0, (self.until_steps or 0) - step)
        return max(0, -((tokens - self.until_tokens) // (self.batch * sequence_length)))

    def __str__(self) -> str:
        if self.until_steps is not None:
            return f"{self.batch} until step {self.until_steps:,}"
        return f"{self.batch} until {self.until_tokens:,} tokens"


@dataclass(frozen=True)
class EqualSteps:
    """Consecutive steps of a run that have the same global batch.

    first    steps of the run before these steps
    steps    number of steps
    batch    sequences per step
    """

    first: int
    steps: int
    batch: int

    @property
    def samples(self) -> int:
        """Sequences of all steps."""
        return self.steps * self.batch


def ramp_checks(
    ramp: tuple[RampStage, ...], final: int, steps: int, sequence_length: int
) -> Iterator[Check]:
    """Check that batches increase from stage to stage, and that every stage has at least one step.

    final  global batch after the ramp
    steps  steps of the run
    """
    step = tokens = 0
    if any(wrong for stage in ramp for _, wrong, _ in stage.checks()):
        return  # the stage itself reports this
    for i, stage in enumerate(ramp):
        last = i + 1 == len(ramp)
        name, batch = ("global_batch", final) if last else ("the next stage", ramp[i + 1].batch)
        rule = f"must be below {name} = {batch}, because a ramp only grows, got {stage.batch}"
        yield f"batch_ramp[{i}].batch", stage.batch >= batch, rule
        limit = "until_tokens" if stage.until_steps is None else "until_steps"
        key, value = f"batch_ramp[{i}].{limit}", getattr(stage, limit)
        count = stage.steps_left(step, tokens, sequence_length)
        rule = f"must be above {step:,} steps and {tokens:,} tokens, where the stage begins"
        yield key, not count, f"{rule}, got {value:,}"
        step, tokens = step + count, tokens + count * stage.batch * sequence_length
        yield (
            key,
            step >= steps,
            f"must end before steps = {steps:,}, got {value:,}, which ends after step {step:,}; "
            "for a shorter run with the same ramp, set exit_step",
        )


Steps = Annotated[int, Field(ge=1, le=10**10)]


class TrainConfig(Section):
    """Length, batches and precision of training."""

    steps: Steps
    """Optimizer steps of the whole run; the learning-rate schedule ends at this step."""
    exit_step: Count | None = None
    """Step after which the run ends early, with the schedule of `steps`; null = `steps`."""
    global_batch: Batch
    """Sequences per optimizer step, over all ranks; gradients accumulate over the micro-batches."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Stages at the start of the run with fewer sequences per step, such as `[{batch: 64,
    until_tokens: 252000000}]`; `global_batch` applies after the last stage. [] uses `global_batch`
    from the start. `steps` includes the steps of all stages."""
    micro_batch: Batch
    """Sequences per forward and backward pass on one rank."""
    sequence_length: Annotated[int, Field(ge=1, le=1 << 26)]
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of the forward and backward passes; master weights and optimizer state are fp32."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """FP8 format of linear layers under Transformer Engine; null computes them in `precision`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes. none: no activations; selective: activations
    of dense and shared feed-forward blocks; full: all activations of a layer except its input."""
    loss_chunk: Count | None = None
    """Vocabulary entries per rank whose logits are in memory at once; the backward pass then
    repeats the product with the output head. null keeps all logits."""
    fused_loss: Literal["auto", "liger"] | None = "auto"
    """Kernels of the loss: liger uses liger-kernel, which passes over the logits twice; null uses
    megatron-core's kernels, with one pass per operation. auto is liger on a GPU if liger-kernel is
    installed and `loss_chunk` is null."""
    z_loss: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Coefficient of the z-loss, the mean over tokens of the squared log-sum-exp of the logits
    (PaLM: 1e-4). It is part of the minimised loss, but not of `train/loss` and validation.
    `train/z_loss` is the mean without the coefficient. 0 = none."""
    fused_backward: Literal["auto", "triton"] | None = "auto"
    """Kernels of the backward passes of gated activations and of attention's heads: triton writes
    each gradient in one pass; null leaves these passes to `compile`, or to autograd. auto is triton
    on a GPU with Triton, null under Transformer Engine."""
    compile: Literal["auto", "inductor", "aot_eager"] | None = "auto"
    """Backend of torch.compile for norms with the residual sums before them, rotary embedding and
    activations: inductor fuses them; aot_eager captures the same graphs, for debugging; null does
    not compile. auto is inductor on a GPU where it works, null on a CPU and under Transformer
    Engine, which fuses the same operations."""
    max_skipped_steps: Whole = 10
    """Consecutive non-finite steps to skip before the run aborts."""

    @property
    def last(self) -> int:
        """Step after which the run ends, `exit_step` or `steps`."""
        return self.exit_step or self.steps

    @property
    def exits_early(self) -> bool:
        """Whether the run ends before its schedule."""
        return self.last < self.steps

    def equal_steps(
        self, step: int = 0, tokens: int = 0, until: int | None = None
    ) -> Iterator[EqualSteps]:
        """Yield the rest of the run in parts with one global batch each.

        The rest begins after `step` steps and `tokens` tokens and ends with step `until`, by
        default the last step.
        """
        last = self.steps if until is None else until
        for stage in self.batch_ramp:
            left = stage.steps_left(step, tokens, self.sequence_length)
            if (count := min(left, last - step)) > 0:
                yield EqualSteps(step, count, stage.batch)
                step, tokens = step + count, tokens + count * stage.batch * self.sequence_length
        if step < last:
            yield EqualSteps(step, last - step, self.global_batch)

    def batch(self, step: int, tokens: int) -> int:
        """Return the global batch of the step after `step` steps and `tokens` tokens."""
        return next((each.batch for each in self.equal_steps(step, tokens)), self.global_batch)

    def samples(self, step: int = 0, tokens: int = 0, until: int | None = None) -> int:
        """Return the number of sequences in the parts that `equal_steps` yields."""
        return sum(each.samples for each in self.equal_steps(step, tokens, until))

    @property
    def batches(self) -> list[int]:
        """All global batches of the run, ascending."""
        return [*(stage.batch for stage in self.batch_ramp), self.global_batch]

    def checks(self) -> Iterator[Check]:
        """Check the loss, the precision and the length."""
        chunked_liger = self.fused_loss == "liger" and self.loss_chunk is not None
        yield "loss_chunk", chunked_liger, "must be null with fused_loss liger"
        yield "fp8", self.fp8 is not None and self.precision != "bf16", "needs precision bf16"
        yield "exit_step", self.last > self.steps, f"must be at most steps = {self.steps}"
        yield from ramp_checks(self.batch_ramp, self.global_batch, self.steps, self.sequence_length)


class ScheduleConfig(Section):
    """Learning rate over the run, as a factor of every group's peak."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warmup-stable-decay) is constant, then decays linearly."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of warm-up and decay: steps or tokens. With tokens, a batch of `train.global_batch`
    sequences is one step, and a smaller batch of `train.batch_ramp` a fraction of a step."""
    warmup_steps: Whole = 0
    """Steps of linear warm-up from 0 to the peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the run, for every kind but constant."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the run over which wsd decays."""

    def length(self, train: TrainConfig) -> float:
        """Return the length of a run in steps; in tokens, a step has `train.global_batch`
        sequences."""
        return train.steps if self.unit == "steps" else train.samples() / train.global_batch

    def cooldown_steps(self, total_steps: float) -> float:
        """Return the steps over which wsd decays in a run of `total_steps`: a whole number, unless
        the whole run decays."""
        return min(round(self.cooldown_fraction * total_steps), total_steps)

    def decay_start(self, train: TrainConfig) -> int:
        """Return the number of steps before the decay of wsd."""
        cooldown = self.cooldown_steps(self.length(train))
        if self.unit == "steps":
            return train.steps - round(cooldown)
        left = train.samples() - round(cooldown * train.global_batch)
        for part in train.equal_steps():
            if left <= part.samples:
                return part.first + -(-left // part.batch)
            left -= part.samples
        return train.steps


def step_factor(step: int, tokens: int, train: TrainConfig, schedule: ScheduleConfig) -> float:
    """Return the factor of the step after `step` steps and `tokens` tokens."""
    if schedule.unit == "steps":
        return learning_rate_factor(step, train.steps, schedule)
    full = train.global_batch * train.sequence_length
    total = tokens + train.samples(step, tokens) * train.sequence_length
    size = train.batch(step, tokens) / train.global_batch
    return learning_rate_factor(tokens / full, total / full, schedule, size)


def learning_rate_factor(
    step: float, total_steps: float, schedule: ScheduleConfig, size: float = 1.0
) -> float:
    """Return the factor of step `step`, counted from 0, in a run of `total_steps`.

    In a batch ramp, a step may count as a fraction of a step, `size`; later steps may then begin at
    a fractional `step`.

    Warm-up is (step + 1) / warmup_steps, so no step has rate 0 and the last one has factor 1. Decay
    starts at step warmup_steps with factor 1 and would reach `min_ratio` at step total_steps, the
    first step that is not taken; from there on the factor is constant. The decay equals torch's
    CosineAnnealingLR or LinearLR over total_steps - warmup_steps steps.
    """
    if step < schedule.warmup_steps:
        return min(1.0, (step + size) / schedule.warmup_steps)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        start = total_steps - schedule.cooldown_steps(total_steps)
    else:
        start = schedule.warmup_steps
    length = max(1, total_steps - start)
    done = 1.0 if step >= total_steps else max(0.0, (step - start) / length)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.min_ratio + (1 - schedule.min_ratio) * left
