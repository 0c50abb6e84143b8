"""Progress of a run: steps taken, position in the order of samples, and phase of the data. A phase
consists of the samples that share one mixture of sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.section import Whole


@dataclass(frozen=True, kw_only=True)
class SetCount:
    """Tokens that a run has read of one set, including samples that rewinds leave out.

    tokens   tokens that the samples predict
    content  digest of the set, which distinguishes it from another set of the same name
    """

    samples: Whole
    tokens: Whole
    content: str


Counts = Mapping[str, SetCount]
"""Counts of each set by name, including removed sets."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The samples from `sample` on, in the order of one mixture.

    read     counts of each set before the phase
    mixture  fingerprint of the sets and weights; "" in the first phase, and if an earlier version
             wrote it
    """

    sample: Whole = 0
    read: dict[str, SetCount] = field(default_factory=dict)
    mixture: str = ""

    def tokens(self, name: str) -> int:
        """Return the tokens of a set that were read before the phase."""
        return self.read[name].tokens if name in self.read else 0

    def samples(self, name: str) -> int:
        """Return the samples of a set that were read before the phase."""
        return self.read[name].samples if name in self.read else 0


Windows = tuple[tuple[int, int], ...]
"""[first, end) ranges of samples that a run leaves out."""


@dataclass
class Progress:
    """Progress of a run.

    step        optimizer steps taken
    sample      samples of the order consumed so far, used or left out
    tokens      tokens that the steps taken have predicted
    left_out    [first, end) of the samples that rewinds leave out
    unreported  metrics of the last step, if a stop prevented their report
    phase       the present phase: its first sample, and the counts of each set before it
    read        in a checkpoint: counts of each set so far; None in versions without counts
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


def batch_start(sample: int, global_batch: int, left_out: Windows) -> int:
    """Return the first sample, from `sample` on, of a global batch without left-out samples."""
    for first, end in sorted(left_out):
        if sample < end and sample + global_batch > first:
            sample = end
    return sample
