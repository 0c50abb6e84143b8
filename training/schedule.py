"""Learning rate over a run, as a factor in [0, 1] on every group's peak."""

import math

from training.config.schema import ScheduleConfig


def learning_rate_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Return the factor of step `step`, counted from 0, in a run of `total_steps`.

    Warm-up is (step + 1) / warmup_steps, so no step has rate 0 and the last one has factor 1. Decay
    starts at step warmup_steps with factor 1 and would reach `min_ratio` at step total_steps, the
    first that is not taken; from there on the factor is constant. That is torch's CosineAnnealingLR
    or LinearLR over total_steps - warmup_steps steps.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
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
