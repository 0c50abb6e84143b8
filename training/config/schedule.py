"""Config sections `train` and `schedule`: run length, batch sizes, precision and learning rate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from models.section import Check, Count, Section, Whole

Batch = Annotated[int, Field(ge=1, le=1 << 24)]


class RampStage(Section):
    """A stage of the batch ramp, with a batch smaller than `global_batch`. The first stage starts
    with the run; each later stage starts when the previous one ends."""

    batch: Batch
    """Global batch size in sequences; must be below the batch sizes of all later stages and below
    `train.global_batch`."""
    until_steps: Count | None = None
    """Last step of the stage, counted from the start of the run; null = `until_tokens` determines
    the end."""
    until_tokens: Count | None = None
    """The stage ends with the step that reaches this number of tokens, counted from the start of
    the run; null = `until_steps` determines the end."""

    def checks(self) -> Iterator[Check]:
        """Check that exactly one limit is set."""
        limits = [limit for limit in (self.until_steps, self.until_tokens) if limit is not None]
        rule = f"or until_tokens must be set, but only one of these keys, got {len(limits)} keys"
        yield "until_steps", len(limits) != 1, rule

    def steps_left(self, step: int, tokens: int, sequence_length: int) -> int:
        """Return the number of steps left in this stage after `step` steps and `tokens` tokens."""
        if self.until_tokens is None:
            return max(0, (self.until_steps or 0) - step)
        return max(0, -((tokens - self.until_tokens) // (self.batch * sequence_length)))

    def __str__(self) -> str:
        if self.until_steps is not None:
            return f"{self.batch} until step {self.until_steps:,}"
        return f"{self.batch} until {self.until_tokens:,} tokens"


@dataclass(frozen=True)
class EqualSteps:
    """A segment of a run: consecutive steps with the same global batch size.

    first    number of steps before the segment
    steps    number of steps in the segment
    batch    global batch size in sequences
    """

    first: int
    steps: int
    batch: int

    @property
    def samples(self) -> int:
        """Total number of sequences in the segment."""
        return self.steps * self.batch


Steps = Annotated[int, Field(ge=1, le=10**10)]


class TrainConfig(Section):
    """Training length, batch sizes, precision and kernels."""

    steps: Steps
    """Total number of optimizer steps; the learning-rate schedule ends at this step."""
    exit_step: Count | None = None
    """Exit after this step without shortening the schedule, which still ends at `steps`; null =
    `steps`."""
    global_batch: Batch
    """Sequences per optimizer step, summed over ranks and micro-batches."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Stages with smaller batches at the start of the run, such as `[{batch: 64, until_tokens:
    252000000}]`; `global_batch` applies after the last stage. `steps` includes the steps in all
    stages. [] = `global_batch` from the start."""
    micro_batch: Batch
    """Sequences per rank in each forward and backward pass."""
    sequence_length: Annotated[int, Field(ge=1, le=1 << 26)]
    """Sequence length in tokens."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the forward and backward passes; master weights and optimizer state are fp32."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """FP8 format for Transformer Engine's linear layers; null = compute them in `precision`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. none: store all activations; selective: recompute the activations
    of dense and shared feed-forward blocks; full: store only the input of each layer."""
    loss_chunk: Count | None = None
    """Compute the logits in chunks of this many vocabulary entries per rank to save memory; the
    backward pass recomputes them. null = compute all logits at once."""
    fused_loss: Literal["auto", "liger"] | None = "auto"
    """Cross-entropy kernels. liger: liger-kernel, which makes two passes over the logits; null:
    megatron-core's kernels, which make one pass per operation; auto: liger on GPUs if liger-kernel
    is installed and `loss_chunk` is null, otherwise null."""
    z_loss: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Coefficient of the z-loss, the squared log-sum-exp of the logits averaged over tokens (PaLM
    uses 1e-4; 0 = off). The z-loss is added to the training objective, but not to `train/loss` or
    validation losses. `train/z_loss` is the z-loss without the coefficient."""
    fused_backward: Literal["auto", "triton"] | None = "auto"
    """Backward kernels for gated activations and attention heads. triton: kernels that write each
    gradient in one pass; null: the kernels of `compile` or autograd; auto: triton on GPUs if Triton
    is available and Transformer Engine is not used, otherwise null."""
    compile: Literal["auto", "inductor", "aot_eager"] | None = "auto"
    """torch.compile backend for activations, rotary embeddings and norms with the preceding
    residual add. inductor: fuse these operations; aot_eager: capture the same graphs without
    fusing, for debugging; null: do not compile; auto: inductor on GPUs that support it, null on CPU
    and with Transformer Engine, which fuses the same operations."""
    max_skipped_steps: Whole = 10
    """Maximum number of consecutive steps to skip because of non-finite values or loss spikes; the
    next skip ends the run."""

    @property
    def last(self) -> int:
        """Step after which the run ends: `exit_step` if set, else `steps`."""
        return self.exit_step or self.steps

    @property
    def exits_early(self) -> bool:
        """Whether the run ends before its schedule ends."""
        return self.last < self.steps

    def equal_steps(
        self, step: int = 0, tokens: int = 0, until: int | None = None
    ) -> Iterator[EqualSteps]:
        """Yield the remaining segments of the run, each with a constant global batch size.

        The first segment starts after `step` steps and `tokens` tokens. The last segment ends at
        step `until` (default: the last step of the run).
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
        """Return the global batch size of the step after `step` steps and `tokens` tokens."""
        return next((each.batch for each in self.equal_steps(step, tokens)), self.global_batch)

    def samples(self, step: int = 0, tokens: int = 0, until: int | None = None) -> int:
        """Return the number of sequences in the segments yielded by `equal_steps`."""
        return sum(each.samples for each in self.equal_steps(step, tokens, until))

    @property
    def batches(self) -> list[int]:
        """All global batch sizes of the run, in ascending order."""
        return [*(stage.batch for stage in self.batch_ramp), self.global_batch]

    def checks(self) -> Iterator[Check]:
        """Check the loss, precision, run length and batch ramp."""
        chunked_liger = self.fused_loss == "liger" and self.loss_chunk is not None
        yield "loss_chunk", chunked_liger, "must be null with fused_loss liger"
        yield "fp8", self.fp8 is not None and self.precision != "bf16", "requires precision bf16"
        yield "exit_step", self.last > self.steps, f"must be at most steps = {self.steps}"
        # Batch sizes must increase.
        ramp = self.batch_ramp
        for i, stage in enumerate(ramp):
            last = i + 1 == len(ramp)
            name = "global_batch" if last else "the next batch"
            batch = self.global_batch if last else ramp[i + 1].batch
            rule = f"must be below {name} = {batch}, got {stage.batch}: batch sizes must grow"
            yield f"batch_ramp[{i}].batch", stage.batch >= batch, rule
        if any(wrong for stage in ramp for _, wrong, _ in stage.checks()):
            return  # `RampStage.checks` reports the problem
        # Every stage must last at least one step.
        steps, step, tokens = self.steps, 0, 0
        for i, stage in enumerate(ramp):
            limit = "until_tokens" if stage.until_steps is None else "until_steps"
            key, value = f"batch_ramp[{i}].{limit}", getattr(stage, limit)
            count = stage.steps_left(step, tokens, self.sequence_length)
            rule = f"must be above the start of the stage (step {step:,}, {tokens:,} tokens)"
            yield key, not count, f"{rule}, got {value:,}"
            step, tokens = step + count, tokens + count * stage.batch * self.sequence_length
            rule = (
                f"must end the stage before steps = {steps:,}, got {value:,}, which ends the stage "
                f"after step {step:,}; for a shorter run with the same ramp, set exit_step"
            )
            yield key, step >= steps, rule


class ScheduleConfig(Section):
    """Learning-rate schedule: a factor applied to every group's peak learning rate."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warmup-stable-decay) stays constant, then decays linearly."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit in which warm-up and decay are measured. With `tokens`, a batch of `train.global_batch`
    sequences counts as one step, and a smaller batch in `train.batch_ramp` counts as a fraction of
    a step."""
    warmup_steps: Whole = 0
    """Number of steps over which the learning rate warms up linearly from 0 to its peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate as a fraction of the peak; not used if `kind` is constant."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Length of the final decay of wsd, as a fraction of the run."""

    def length(self, train: TrainConfig) -> float:
        """Return the length of the run in steps or, if `unit` is `tokens`, in full batches of
        `train.global_batch` sequences."""
        return train.steps if self.unit == "steps" else train.samples() / train.global_batch

    def cooldown_steps(self, total_steps: float) -> float:
        """Return the length of wsd's final decay in steps, rounded to an integer and at most
        `total_steps`. `total_steps` is the length of the run."""
        return min(round(self.cooldown_fraction * total_steps), total_steps)

    def decay_start(self, train: TrainConfig) -> int:
        """Return the number of steps before wsd starts to decay."""
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
    """Return the learning-rate factor for the step after `step` steps and `tokens` tokens."""
    if schedule.unit == "steps":
        return learning_rate_factor(step, train.steps, schedule)
    full = train.global_batch * train.sequence_length
    total = tokens + train.samples(step, tokens) * train.sequence_length
    size = train.batch(step, tokens) / train.global_batch
    return learning_rate_factor(tokens / full, total / full, schedule, size)


def learning_rate_factor(
    step: float, total_steps: float, schedule: ScheduleConfig, size: float = 1.0
) -> float:
    """Return the learning-rate factor at step `step` (counted from 0) of a run of `total_steps`
    steps.

    If `schedule.unit` is `tokens`, a smaller batch in a batch ramp counts as `size` steps, where
    `size` is below 1. `step` may therefore be fractional.

    The warm-up factor is (step + 1) / warmup_steps, so it is never 0 and reaches 1 at the last
    warm-up step. Decay starts from 1 at step warmup_steps and reaches `min_ratio` at step
    total_steps, one step past the last step of the run. After that, the factor is constant. The
    decay matches torch's CosineAnnealingLR or LinearLR over total_steps - warmup_steps steps.
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
