"""Config sections `train` and `schedule`: length, batch sizes, precision and learning rate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from models.section import Check, Count, Section, Whole

Batch = Annotated[int, Field(ge=1, le=1 << 24)]


class RampStage(Section):
    """A part of the run with fewer sequences per step. The first stage begins with the run, each
    later stage when the previous stage ends."""

    batch: Batch
    """Sequences per optimizer step; must be smaller than in later stages and smaller than
    `train.global_batch`."""
    until_steps: Count | None = None
    """Last step of the stage, counted from the start of the run; null = `until_tokens` sets the end
    of the stage."""
    until_tokens: Count | None = None
    """Number of tokens since the start of the run; the step that reaches this number ends the
    stage. null = `until_steps` sets the end of the stage."""

    def checks(self) -> Iterator[Check]:
        """Check that exactly one limit is set."""
        limits = [limit for limit in (self.until_steps, self.until_tokens) if limit is not None]
        rule = f"or until_tokens must be set, exactly one of the two, got {len(limits)}"
        yield "until_steps", len(limits) != 1, rule

    def steps_left(self, step: int, tokens: int, sequence_length: int) -> int:
        """Return the number of remaining steps of this stage after `step` steps and `tokens`
        tokens."""
        if self.until_tokens is None:
            return max(0, (self.until_steps or 0) - step)
        return max(0, -((tokens - self.until_tokens) // (self.batch * sequence_length)))

    def __str__(self) -> str:
        if self.until_steps is not None:
            return f"{self.batch} until step {self.until_steps:,}"
        return f"{self.batch} until {self.until_tokens:,} tokens"


@dataclass(frozen=True)
class EqualSteps:
    """Consecutive steps of a run with the same global batch size.

    first    number of earlier steps of the run
    steps    number of these steps
    batch    sequences per step
    """

    first: int
    steps: int
    batch: int

    @property
    def samples(self) -> int:
        """Number of sequences in all steps."""
        return self.steps * self.batch


def ramp_checks(
    ramp: tuple[RampStage, ...], final: int, steps: int, sequence_length: int
) -> Iterator[Check]:
    """Check that batch sizes increase, and that every stage has at least one step.

    final  global batch size after the ramp
    steps  number of steps of the run
    """
    step = tokens = 0
    if any(wrong for stage in ramp for _, wrong, _ in stage.checks()):
        return  # `RampStage.checks` reports the problem
    for i, stage in enumerate(ramp):
        last = i + 1 == len(ramp)
        name, batch = ("global_batch", final) if last else ("the next batch", ramp[i + 1].batch)
        rule = f"must be below {name} = {batch}, because batches must grow, got {stage.batch}"
        yield f"batch_ramp[{i}].batch", stage.batch >= batch, rule
        limit = "until_tokens" if stage.until_steps is None else "until_steps"
        key, value = f"batch_ramp[{i}].{limit}", getattr(stage, limit)
        count = stage.steps_left(step, tokens, sequence_length)
        rule = f"must be above the start of the stage (step {step:,}, {tokens:,} tokens)"
        yield key, not count, f"{rule}, got {value:,}"
        step, tokens = step + count, tokens + count * stage.batch * sequence_length
        rule = (
            f"must end the stage before steps = {steps:,}, got {value:,}, which ends the stage "
            f"after step {step:,}; for a shorter run with the same ramp, set exit_step"
        )
        yield key, step >= steps, rule


Steps = Annotated[int, Field(ge=1, le=10**10)]


class TrainConfig(Section):
    """Length, batches and precision of training."""

    steps: Steps
    """Optimizer steps of the whole run; the learning-rate schedule ends at this step."""
    exit_step: Count | None = None
    """Step after which the run ends early, while the schedule still covers `steps`; null = `steps`.
    """
    global_batch: Batch
    """Sequences per optimizer step, over all ranks and micro-batches."""
    batch_ramp: tuple[RampStage, ...] = ()
    """Stages with fewer sequences per step at the start of the run, such as `[{batch: 64,
    until_tokens: 252000000}]`; `global_batch` applies after the last stage. `steps` includes the
    steps of all stages. [] uses `global_batch` from the start."""
    micro_batch: Batch
    """Sequences per rank in one forward and backward pass."""
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
    """Number of vocabulary entries per rank whose logits are computed at once, to save memory; the
    backward pass recomputes the logits. null computes all logits at once."""
    fused_loss: Literal["auto", "liger"] | None = "auto"
    """Kernels of the loss. liger: liger-kernel, with two passes over the logits; null:
    megatron-core's kernels, with one pass per operation; auto: liger on a GPU if liger-kernel is
    installed and `loss_chunk` is null, otherwise null."""
    z_loss: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Coefficient of the z-loss, the mean over tokens of the squared log-sum-exp of the logits
    (PaLM: 1e-4; 0 = no z-loss). The z-loss is added to the minimised loss, but not to `train/loss`
    or validation losses. The metric `train/z_loss` omits the coefficient."""
    fused_backward: Literal["auto", "triton"] | None = "auto"
    """Kernels of the backward passes of gated activations and attention heads. triton: kernels that
    write each gradient in one pass; null: the kernels of `compile` or autograd; auto: triton on a
    GPU with Triton, null otherwise and under Transformer Engine."""
    compile: Literal["auto", "inductor", "aot_eager"] | None = "auto"
    """Backend of torch.compile for activations, rotary embedding and norms with the preceding
    residual additions. inductor fuses these operations; aot_eager captures the same graphs, for
    debugging; null does not compile; auto is inductor on a GPU that supports it, null on a CPU and
    under Transformer Engine, which fuses the same operations."""
    max_skipped_steps: Whole = 10
    """Maximum number of consecutive non-finite steps or loss spikes to skip; one more ends the
    run."""

    @property
    def last(self) -> int:
        """Step after which the run ends: `exit_step` if set, else `steps`."""
        return self.exit_step or self.steps

    @property
    def exits_early(self) -> bool:
        """Whether the run ends before its schedule."""
        return self.last < self.steps

    def equal_steps(
        self, step: int = 0, tokens: int = 0, until: int | None = None
    ) -> Iterator[EqualSteps]:
        """Yield the remaining parts of the run, each with a constant global batch size.

        The first part begins after `step` steps and `tokens` tokens. The last part ends with step
        `until`, by default the run's last step.
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
        """Return the number of sequences in the parts that `equal_steps` yields."""
        return sum(each.samples for each in self.equal_steps(step, tokens, until))

    @property
    def batches(self) -> list[int]:
        """All global batch sizes of the run, ascending."""
        return [*(stage.batch for stage in self.batch_ramp), self.global_batch]

    def checks(self) -> Iterator[Check]:
        """Check the loss, the precision and the length."""
        chunked_liger = self.fused_loss == "liger" and self.loss_chunk is not None
        yield "loss_chunk", chunked_liger, "must be null with fused_loss liger"
        yield "fp8", self.fp8 is not None and self.precision != "bf16", "needs precision bf16"
        yield "exit_step", self.last > self.steps, f"must be at most steps = {self.steps}"
        yield from ramp_checks(self.batch_ramp, self.global_batch, self.steps, self.sequence_length)


class ScheduleConfig(Section):
    """Learning-rate schedule: a factor that multiplies the peak learning rate of every group."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warmup-stable-decay) is constant and then decays linearly."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit in which warm-up and decay are measured. With tokens, a batch of `train.global_batch`
    sequences counts as one step, a smaller batch of `train.batch_ramp` as a fraction of a step."""
    warmup_steps: Whole = 0
    """Number of steps of linear warm-up from 0 to the peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the run, for all kinds except constant."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Final fraction of the run in which wsd decays."""

    def length(self, train: TrainConfig) -> float:
        """Return the length of a run in steps or, with unit tokens, in batches of
        `train.global_batch`."""
        return train.steps if self.unit == "steps" else train.samples() / train.global_batch

    def cooldown_steps(self, total_steps: float) -> float:
        """Return the number of steps in which wsd decays in a run of `total_steps`, rounded
        to an integer but at most `total_steps`."""
        return min(round(self.cooldown_fraction * total_steps), total_steps)

    def decay_start(self, train: TrainConfig) -> int:
        """Return the number of steps before wsd decays."""
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
    """Return the learning-rate factor of the step after `step` steps and `tokens` tokens."""
    if schedule.unit == "steps":
        return learning_rate_factor(step, train.steps, schedule)
    full = train.global_batch * train.sequence_length
    total = tokens + train.samples(step, tokens) * train.sequence_length
    size = train.batch(step, tokens) / train.global_batch
    return learning_rate_factor(tokens / full, total / full, schedule, size)


def learning_rate_factor(
    step: float, total_steps: float, schedule: ScheduleConfig, size: float = 1.0
) -> float:
    """Return the learning-rate factor of step `step`, counted from 0, in a run of `total_steps`.

    A smaller batch of a batch ramp counts as the fraction `size` of a step. `step` may then be
    fractional.

    The warm-up factor is (step + 1) / warmup_steps, so no step has factor 0 and the last warm-up
    step has factor 1. Decay starts at step warmup_steps with factor 1 and reaches `min_ratio` at
    step total_steps, one step after the run's last step. Afterwards the factor is constant. The
    decay equals torch's CosineAnnealingLR or LinearLR over total_steps - warmup_steps steps.
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
