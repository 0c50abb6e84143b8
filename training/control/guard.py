"""What happens when a loss or a gradient is not finite or a loss jumps: skip, count, and stop in
time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """Too many steps in a row had no finite loss and gradient, or a loss that jumped.

    first_step  the first of these steps
    samples     [first, end) of their samples
    """

    def __init__(self, message: str, first_step: int, samples: tuple[int, int]) -> None:
        super().__init__(message)
        self.first_step = first_step
        self.samples = samples


class SpikeDetector:
    """Which losses lie far above the last ones; decided on the device, the same on every rank."""

    def __init__(self, deviations: float | None, window: int, device: torch.device) -> None:
        """A loss is a spike if it is more than `deviations` standard deviations above the mean of
        the `window` last losses of steps that were taken; None: no loss is."""
        self.deviations = deviations
        self.losses = torch.full((window,), torch.nan, dtype=torch.float64, device=device)

    def is_not_spike(self, loss: Tensor) -> Tensor:
        """0-d bool: whether `loss` is no spike. While the window is not full, none is."""
        if self.deviations is None:
            return torch.ones((), dtype=torch.bool, device=loss.device)
        # NaN where the window is not full, of which nothing is larger.
        limit = self.losses.mean() + self.deviations * self.losses.std()
        return ~(loss > limit)

    def record(self, loss: Tensor, active: Tensor) -> None:
        """Take the loss of a step that was taken into the window."""
        if self.deviations is not None:
            longer = torch.cat([self.losses[1:], loss.double().reshape(1)])
            self.losses = torch.where(active, longer, self.losses)

    def restore(self, losses: Sequence[float]) -> None:
        """None; the losses of a checkpoint, as far as the window goes."""
        known = torch.tensor(losses[-len(self.losses) :], dtype=torch.float64)
        self.losses.fill_(torch.nan)
        self.losses[len(self.losses) - len(known) :] = known.to(self.losses.device)


class NonFiniteGuard:
    """Counts the steps that were skipped on the device and stops the run after too many in a row.

    `record` only keeps the step's predicate; on a GPU the host looks at it in `check`, on logging
    steps, so that no step waits for the device. On a CPU it looks at once.
    """

    def __init__(self, *, limit: int, global_batch: int, spikes: bool = False) -> None:
        """`limit` skipped steps in a row are one too many when exceeded; `global_batch` is the
        number of samples of a step, to say which samples were skipped; `spikes` is whether a
        finite loss may have been skipped."""
        self.limit = limit
        self.global_batch = global_batch
        self.spikes = spikes
        self.skipped = 0
        self._in_a_row: list[tuple[int, int]] = []
        self._pending: list[tuple[int, int, Tensor]] = []

    def record(self, step: int, sample: int, active: Tensor) -> None:
        """Note whether `step` (counted from 1) was taken; `sample` is its first sample."""
        self._pending.append((step, sample, active))
        if active.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise NonFiniteError if more than `limit` steps in a row were skipped."""
        if not self._pending:
            return
        taken = torch.stack([active for _, _, active in self._pending]).tolist()
        steps = [(step, sample) for step, sample, _ in self._pending]
        self._pending.clear()
        for step, ok in zip(steps, taken, strict=True):
            if ok:
                self._in_a_row.clear()
                continue
            self.skipped += 1
            self._in_a_row.append(step)
            if len(self._in_a_row) > self.limit:
                raise self._error()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; waits for the device."""
        self.check()
        return {"skipped": self.skipped, "in_a_row": [list(step) for step in self._in_a_row]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.skipped = state["skipped"]
        self._in_a_row = [(step, sample) for step, sample in state["in_a_row"]]
        self._pending.clear()

    def _error(self) -> NonFiniteError:
        (first, sample), (last, last_sample) = self._in_a_row[0], self._in_a_row[-1]
        end = last_sample + self.global_batch
        return NonFiniteError(
            f"loss or gradient not finite{' or the loss a spike' * self.spikes} in steps {first} "
            f"to {last}, more than train.max_skipped_steps = {self.limit} in a row; their samples "
            f"are {sample} to {end - 1}",
            first,
            (sample, end),
        )
