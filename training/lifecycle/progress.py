"""How far a run is: steps taken, and where in the order of samples it reads on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.data.order import Windows, batch_start


@dataclass
class Progress:
    """Where a run stands.

    step        optimizer steps taken
    sample      number of samples of the order that are behind it, used or left out
    left_out    [first, end) of the samples that a rewind leaves out
    unreported  figures of the last step that a stop kept from being reported
    """

    step: int = 0
    sample: int = 0
    left_out: Windows = ()
    unreported: dict[str, Any] = field(default_factory=dict)

    def advance(self, global_batch: int) -> int:
        """The first sample of the step that is now taken, which is then behind."""
        first = batch_start(self.sample, global_batch, self.left_out)
        self.step += 1
        self.sample = first + global_batch
        return first

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "step": self.step,
            "sample": self.sample,
            "left_out": [list(window) for window in self.left_out],
            "unreported": self.unreported,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Progress":
        """The progress that `as_dict` gave."""
        left_out = tuple((first, end) for first, end in values["left_out"])
        return cls(values["step"], values["sample"], left_out, dict(values["unreported"]))
