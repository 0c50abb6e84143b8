"""The guard against nonfinite losses and gradients."""

import pytest
import torch

from training.nonfinite import NonFiniteError, NonFiniteGuard


def record(guard: NonFiniteGuard, taken: list[bool], first: int = 1) -> None:
    """Record steps `first`, `first + 1`, ... as taken or skipped."""
    for i, ok in enumerate(taken):
        start = 4 * (first + i - 1)
        guard.record(first + i, (start, start + 4), torch.tensor(ok))


def test_skipped_steps_are_counted():
    guard = NonFiniteGuard(limit=2)
    record(guard, [True, False, False, True, False])
    assert guard.skipped == 3


def test_limit_zero_stops_at_once():
    with pytest.raises(NonFiniteError, match="samples 0 to 7"):
        NonFiniteGuard(limit=0).record(1, (0, 8), torch.tensor(False))
