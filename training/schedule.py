"""Learning rate over a run, as a factor in [0, 1] on every group's peak."""

import math

from training.config.schema import ScheduleConfig, TrainConfig


def step_factor(step: int, tokens: int, train: TrainConfig, schedule: ScheduleConfig) -> float:
    """Return the factor of the step that follows on `step` steps and `tokens` tokens."""
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

    A step of a batch ramp may have the `size` of a part of a step, and then begin within one.

    Warm-up is (step + 1) / warmup_steps, so no step has rate 0 and the last one has factor 1. Decay
    starts at step warmup_steps with factor 1 and would reach `min_ratio` at step total_steps, the
    first that is not taken; from there on the factor is constant. That is torch's CosineAnnealingLR
    or LinearLR over total_steps - warmup_steps steps.
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
