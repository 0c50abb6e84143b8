"""Progress of a run: steps taken, and position in the order of samples."""

from dataclasses import dataclass, field
from typing import Any

from models.section import Whole
from training.data.order import Windows, batch_start
from training.data.phase import Phase, SetCount


@dataclass
class Progress:
    """Progress of a run.

    step        optimizer steps taken
    sample      samples of the order consumed so far, used or left out
    tokens      tokens that the steps taken have predicted
    left_out    [first, end) of the samples that rewinds leave out
    unreported  metrics of the last step that a stop kept from being reported
    phase       the present mixture's first sample, and what was read of each set before it
    read        of a checkpoint: what was read of each set so far; None in those of versions that
                did not count
    """

    step: Whole = 0
    sample: Whole = 0
    tokens: Whole = 0
    left_out: Windows = ()
    unreported: dict[str, Any] = field(default_factory=dict)
    phase: Phase = field(default_factory=Phase)
    read: dict[str, SetCount] | None = None

    def advance(self, global_batch: int, sequence_length: int) -> tuple[int, int]:
        """Advance by one step and return [first, end) of its samples."""
        first = batch_start(self.sample, global_batch, self.left_out)
        self.step += 1
        self.sample = first + global_batch
        self.tokens += global_batch * sequence_length
        return first, self.sample
