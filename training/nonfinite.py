"""Detect loss spikes, count skipped steps, and end the run after too many consecutive skips."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """Raised after too many consecutive steps with a loss spike or a non-finite loss or gradient.

    first_step  first of these steps
    samples     sample range [first, end) used in these steps
    """

    def __init__(self, message: str, first_step: int, samples: tuple[int, int]) -> None:
        super().__init__(message)
        self.first_step = first_step
        self.samples = samples


class SpikeDetector:
    """Detects loss spikes on the device, without a host sync. All ranks get the same result."""

    def __init__(self, deviations: float | None, window: int, device: torch.device) -> None:
        """Compare each loss with the losses of the last `window` steps that were not skipped.

        A loss more than `deviations` standard deviations above the mean of these losses is a spike;
        None disables detection.
        """
        self.deviations = deviations
        self.losses = torch.full((window,), torch.nan, dtype=torch.float64, device=device)

    def is_not_spike(self, loss: Tensor) -> Tensor:
        """Return a 0-d bool: False if `loss` is a spike, otherwise True. Until the window is full,
        no loss is a spike."""
        if self.deviations is None:
            return torch.ones((), dtype=torch.bool, device=loss.device)
        # The limit is NaN until the window is full, and no comparison with NaN is true.
        limit = self.losses.mean() + self.deviations * self.losses.std()
        return ~(loss > limit)

    def record(self, loss: Tensor, active: Tensor) -> None:
        """Add `loss` to the window if the step was not skipped."""
        if self.deviations is not None:
            longer = torch.cat([self.losses[1:], loss.double().reshape(1)])
            self.losses = torch.where(active, longer, self.losses)

    def restore(self, losses: Sequence[float]) -> None:
        """Fill the window with the last losses stored in a checkpoint."""
        recent = torch.tensor(losses[-len(self.losses) :], dtype=torch.float64)
        self.losses.fill_(torch.nan)
        self.losses[len(self.losses) - len(recent) :] = recent.to(self.losses.device)


class NonFiniteGuard:
    """Counts skipped steps, and ends the run if too many consecutive steps are skipped.

    On a GPU, `record` only stores a flag on the device. The flag is true if the step was taken. To
    avoid a host sync in every step, `check` reads these flags at logging steps. On a CPU, `record`
    checks immediately.
    """

    def __init__(self, *, limit: int, spikes: bool) -> None:
        """Allow `limit` consecutive skipped steps. `spikes` is True if loss spikes are skipped as
        well."""
        self.limit = limit
        self.spikes = spikes
        self.skipped = 0
        self._in_a_row: list[tuple[int, int]] = []
        self._pending: list[tuple[int, tuple[int, int], Tensor]] = []

    def record(self, step: int, samples: tuple[int, int], active: Tensor) -> None:
        """Record whether `step`, counted from 1, was taken or skipped. `samples` is the sample
        range [first, end) that the step used."""
        self._pending.append((step, samples, active))
        if active.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise NonFiniteError if more than `limit` consecutive steps were skipped."""
        if not self._pending:
            return
        taken = torch.stack([active for _, _, active in self._pending]).tolist()
        steps = [(step, samples) for step, samples, _ in self._pending]
        self._pending.clear()
        for (step, (first, end)), ok in zip(steps, taken, strict=True):
            if ok:
                self._in_a_row.clear()
                continue
            self.skipped += 1
            self._in_a_row.append((step, first))
            if len(self._in_a_row) > self.limit:
                began, sample = self._in_a_row[0]
                spike = ", or the loss was a spike" if self.spikes else ""
                raise NonFiniteError(
                    f"more than train.max_skipped_steps = {self.limit} consecutive steps were "
                    f"skipped: in steps {began} to {step} (samples {sample} to {end - 1}), the "
                    f"loss or gradient was not finite{spike}",
                    began,
                    (sample, end),
                )

    def check_unit(self, name: str, streak: int, step: int, samples: tuple[int, int]) -> None:
        """Raise NonFiniteError if more than `limit` consecutive updates of a unit were skipped.

        name     unit with the most consecutive skips before `step`
        streak   number of these skips
        samples  sample range [first, end) used at `step`; earlier steps used no more samples
        """
        if streak > self.limit:
            first, end = samples
            raise NonFiniteError(
                f"more than train.max_skipped_steps = {self.limit} consecutive updates of {name} "
                f"were skipped ({streak} before step {step}): these updates were nonfinite or "
                "unbounded",
                max(1, step - streak + 1),
                (max(0, end - streak * (end - first)), end),
            )

    def state(self) -> dict[str, Any]:
        """Return the state to checkpoint. Synchronizes with the device."""
        self.check()
        return {"skipped": self.skipped, "in_a_row": [list(step) for step in self._in_a_row]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`."""
        self.skipped = state["skipped"]
        self._in_a_row = [(step, sample) for step, sample in state["in_a_row"]]
        self._pending.clear()
