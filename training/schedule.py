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
    done = _share_done(step, start, total_steps)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.min_ratio + (1 - schedule.min_ratio) * left


def _share_done(step: int, start: int, end: int) -> float:
    """Position of `step` between `start` and `end`, in [0, 1]."""
    if step >= end:
        return 1.0
    return max(0.0, (step - start) / (end - start)) if start < end else 0.0
