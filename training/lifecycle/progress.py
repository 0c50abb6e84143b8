"""Progress of a run: steps taken, and position in the order of samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.data.order import Windows, batch_start


@dataclass
class Progress:
    """Progress of a run.

    step        optimizer steps taken
    sample      samples of the order consumed so far, used or left out
    tokens      tokens that the steps taken have predicted
    left_out    [first, end) of the samples that rewinds leave out
    unreported  metrics of the last step that a stop kept from being reported
    """

    step: int = 0
    sample: int = 0
    tokens: int = 0
    left_out: Windows = ()
    unreported: dict[str, Any] = field(default_factory=dict)

    def advance(self, global_batch: int, sequence_length: int) -> int:
        """Advance by one step and return its first sample."""
        first = batch_start(self.sample, global_batch, self.left_out)
        self.step += 1
        self.sample = first + global_batch
        self.tokens += global_batch * sequence_length
        return first

    def as_dict(self) -> dict[str, Any]:
        """Return the progress in a form fit for JSON."""
        return {
            "step": self.step,
            "sample": self.sample,
            "tokens": self.tokens,
            "left_out": [list(window) for window in self.left_out],
            "unreported": self.unreported,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Progress":
        """Return the progress that `as_dict` described."""
        left_out = tuple((first, end) for first, end in values["left_out"])
        step, sample, tokens = (values[name] for name in ("step", "sample", "tokens"))
        return cls(step, sample, tokens, left_out, dict(values["unreported"]))
