"""What happens when a loss or a gradient is not finite: skip, count, and stop in time."""

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """Too many steps in a row had no finite loss and gradient."""


class NonFiniteGuard:
    """Counts the steps that were skipped on the device and stops the run after too many in a row.

    `record` only keeps the step's predicate; on a GPU the host looks at it in `check`, on logging
    steps, so that no step waits for the device. On a CPU it looks at once.
    """

    def __init__(self, *, limit: int, global_batch: int) -> None:
        """`limit` skipped steps in a row are one too many when exceeded; `global_batch` is the
        number of samples of a step, to say which samples were skipped."""
        self.limit = limit
        self.global_batch = global_batch
        self.skipped = 0
        self._in_a_row: list[int] = []
        self._pending: list[tuple[int, Tensor]] = []

    def record(self, step: int, active: Tensor) -> None:
        """None; notes whether `step` (counted from 1) was taken."""
        self._pending.append((step, active))
        if active.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """None; raises NonFiniteError if more than `limit` steps in a row were skipped."""
        if not self._pending:
            return
        taken = torch.stack([active for _, active in self._pending]).tolist()
        steps = [step for step, _ in self._pending]
        self._pending.clear()
        for step, ok in zip(steps, taken, strict=True):
            if ok:
                self._in_a_row.clear()
                continue
            self.skipped += 1
            self._in_a_row.append(step)
            if len(self._in_a_row) > self.limit:
                raise NonFiniteError(self._message())

    def _message(self) -> str:
        first, last = self._in_a_row[0], self._in_a_row[-1]
        samples = f"{(first - 1) * self.global_batch} to {last * self.global_batch - 1}"
        return (
            f"loss or gradient not finite in steps {first} to {last}, more than "
            f"train.max_skipped_steps = {self.limit} in a row; their samples are {samples}"
        )
