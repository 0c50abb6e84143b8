"""A phase of a run: the samples that share one mixture of sets, and what was read before them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from models.section import Whole


@dataclass(frozen=True, kw_only=True)
class SetCount:
    """What a run has read of one set, samples that rewinds leave out included.

    tokens   tokens that the samples predict
    content  digest of the set, which tells another set of the same name
    """

    samples: Whole
    tokens: Whole
    content: str


Counts = Mapping[str, SetCount]
"""Counts by the name of the set, of sets that are not in the mixture any more too."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The samples from `sample` on, in the order of one mixture.

    read     counts of each set before it
    mixture  fingerprint of the sets and weights; "" in the first phase, and of earlier versions
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
