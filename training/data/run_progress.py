"""Progress of a run: steps taken, position in the sample order, and data phase. A phase consists of
consecutive samples from the same mixture of sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.section import Whole


@dataclass(frozen=True, kw_only=True)
class SetCount:
    """Numbers of samples and tokens that a run has read of a set, including samples left out.

    tokens   number of target tokens in the samples
    content  digest that distinguishes the set from another set with the same name
    """

    samples: Whole
    tokens: Whole
    content: str


Counts = Mapping[str, SetCount]
"""Counts of each set by name, including removed sets."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive samples from one mixture, beginning with `sample`.

    read     counts of each set before the phase
    mixture  fingerprint of the sets and weights; "" in the first phase, and in checkpoints of
             earlier versions
    """

    sample: Whole = 0
    read: dict[str, SetCount] = field(default_factory=dict)
    mixture: str = ""

    def tokens(self, name: str) -> int:
        """Return the number of tokens of a set that were read before the phase."""
        return self.read[name].tokens if name in self.read else 0

    def samples(self, name: str) -> int:
        """Return the number of samples of a set that were read before the phase."""
        return self.read[name].samples if name in self.read else 0


Windows = tuple[tuple[int, int], ...]
"""[first, end) ranges of samples that a run leaves out."""


@dataclass
class Progress:
    """Progress of a run.

    step        number of optimizer steps taken
    sample      number of samples consumed so far, used or left out
    tokens      number of target tokens in the steps taken
    left_out    [first, end) of the samples that rewinds leave out
    unreported  metrics of the last step, if the run stopped before it reported them
    phase       the current phase: its first sample, and the counts of each set before it
    read        in a checkpoint, counts of each set so far; None if an earlier version saved it
    """

    step: Whole = 0
    sample: Whole = 0
    tokens: Whole = 0
    left_out: Windows = ()
    unreported: dict[str, Any] = field(default_factory=dict)
    phase: Phase = field(default_factory=Phase)
    read: dict[str, SetCount] | None = None

    def advance(self, global_batch: int, sequence_length: int) -> tuple[int, int]:
        """Advance by one step and return [first, end) of the step's samples."""
        first = batch_start(self.sample, global_batch, self.left_out)
        self.step += 1
        self.sample = first + global_batch
        self.tokens += global_batch * sequence_length
        return first, self.sample


def batch_start(sample: int, global_batch: int, left_out: Windows) -> int:
    """Return the first sample, at or after `sample`, of a global batch without left-out samples."""
    for first, end in sorted(left_out):
        if sample < end and sample + global_batch > first:
            sample = end
    return sample
