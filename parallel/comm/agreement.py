"""Agreement of all ranks' hosts while they train: who wants to stop, whose writer has finished.

The reductions use a process group of the CPU, so that nobody waits for a device.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import Pending, from_all, gather, named
from spectral.batching import grouped

SHOWN = 8
"""Ranks that are named for one value."""


class Agreement:
    """Element-wise maxima of every rank's figures. All ranks call it in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._under_way: tuple[Pending, Tensor] | None = None

    def delayed(self, figures: Sequence[int]) -> list[int] | None:
        """Start a reduction of `figures` and return the maxima of the one before, if there was one.

        That one began a step ago, so nobody waits for it.
        """
        before = self._collect()
        own = torch.tensor(list(figures), dtype=torch.int64)
        with named("agreement of all ranks"):
            work = dist.all_reduce(own, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._under_way = Pending("agreement of all ranks", work), own
        return before

    def now(self, figures: Sequence[int]) -> list[int]:
        """Maxima of every rank's figures now; waits for all ranks.

        The result of a reduction under way is dropped.
        """
        self.delayed(figures)
        result = self._collect()
        assert result is not None  # `delayed` has started it
        return result

    def gather(self, figures: Sequence[float]) -> Tensor:
        """Every rank's figures, float64 `[ranks, figures]`."""
        own = torch.tensor(list(figures), dtype=torch.float64)
        return torch.stack(gather(own, self.group, "figures of all ranks"))

    def _collect(self) -> list[int] | None:
        """Wait for the reduction under way and return its result, None without one."""
        if self._under_way is None:
            return None
        pending, figures = self._under_way
        self._under_way = None
        pending.wait()
        return figures.tolist()


def disagreements(facts: Mapping[str, object]) -> list[str]:
    """Return a sentence for each fact that is not the same on all ranks, on every rank.

    Collective. Facts are sent only if their hashes differ.
    """
    with named("comparison of all ranks' settings"):
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
        if len(set(from_all(digest))) == 1:
            return []
        everyone = from_all((socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in everyone]
    return list(differing([facts for _, facts in everyone], hosts))


def differing(facts: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each fact that differs, with the ranks that most others disagree with.

    `facts` and `hosts` have an entry per rank.
    """
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [repr(each[key]) if key in each else "absent" for each in facts]
        ranks = grouped(range(len(facts)), values.__getitem__)
        if len(ranks) == 1:
            continue
        usual = Counter({value: len(those) for value, those in ranks.items()}).most_common(1)[0][0]
        parts = [
            f"{value} on {_named(those, hosts)}"
            for value, those in ranks.items()
            if value != usual or len(those) == 1
        ]
        if len(ranks[usual]) > 1:
            parts.append(f"{usual} on the other {len(ranks[usual])}")
        yield f"{key} differs between ranks: {', '.join(parts)}"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """The first of some ranks, with their hosts."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:SHOWN]) + more
