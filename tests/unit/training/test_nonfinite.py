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
    guard = NonFiniteGuard(limit=2, spikes=False)
    record(guard, [True, False, False, True, False])
    assert guard.skipped == 3


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU, where steps are not checked immediately."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def test_a_checkpoint_contains_the_steps_that_were_not_checked_yet():
    guard, other = NonFiniteGuard(limit=2, spikes=False), NonFiniteGuard(limit=2, spikes=False)
    for step, ok in enumerate([False, True, False], start=1):
        guard.record(step, (4 * step - 4, 4 * step), torch.tensor(ok).as_subclass(OnDevice))
    assert guard.skipped == 0
    other.restore(guard.state())
    assert other.skipped == 2
    with pytest.raises(NonFiniteError, match="in steps 3 to 5 .*samples 8 to 19"):
        record(other, [False, False], first=4)


def test_limit_zero_stops_at_once():
    with pytest.raises(NonFiniteError, match="samples 0 to 7"):
        NonFiniteGuard(limit=0, spikes=False).record(1, (0, 8), torch.tensor(False))
