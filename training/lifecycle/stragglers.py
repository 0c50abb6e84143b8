"""Ranks that have long been slower than others that do the same."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

RATIO: Final = 1.2
"""Local time, of the median over ranks of the same pipeline stage, above which a rank is slow."""

STEPS: Final = 50
"""Steps in a row for which a rank must be slow to be named."""


class Stragglers:
    """Counts for how many steps in a row each rank has been slow.

    Ranks that wait for each other within forward and backward passes, those of one tensor-parallel
    group or pipeline, are slow together.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int]) -> None:
        """`hosts` and `stages` have host name and pipeline stage of every rank."""
        self.hosts = hosts
        self.stages = stages
        self._slow = [0] * len(hosts)

    def new(self, seconds: Sequence[float], steps: int) -> Iterator[str]:
        """Yield a sentence for each rank that has become a straggler.

        seconds  local time of every rank, a mean over the last steps
        steps    number of these steps
        """
        medians = {}
        for stage in set(self.stages):
            there = [s for s, other in zip(seconds, self.stages, strict=True) if other == stage]
            medians[stage] = median(there)
        for rank, (own, stage) in enumerate(zip(seconds, self.stages, strict=True)):
            before = self._slow[rank]
            self._slow[rank] = before + steps if own > RATIO * medians[stage] else 0
            if before < STEPS <= self._slow[rank]:
                yield (
                    f"rank {rank} (host {self.hosts[rank]}) has been slow for "
                    f"{self._slow[rank]} steps: {own:.3g} s a step before it waits for others, "
                    f"the median of its stage is {medians[stage]:.3g} s"
                )
