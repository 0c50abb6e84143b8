"""Agreement of all ranks' hosts while they train: who wants to stop, whose writer has finished.

The reductions use a process group of the CPU, so that nobody waits for a device.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import Pending, named


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
        mine = torch.tensor(list(figures), dtype=torch.int64)
        with named("agreement of all ranks"):
            work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._under_way = Pending("agreement of all ranks", work), mine
        return before

    def now(self, figures: Sequence[int]) -> list[int]:
        """Maxima of every rank's figures now; waits for all ranks.

        The result of a reduction under way is dropped.
        """
        self._collect()
        mine = torch.tensor(list(figures), dtype=torch.int64)
        with named("agreement of all ranks"):
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group)
        return mine.tolist()

    def gather(self, figures: Sequence[float]) -> Tensor:
        """Every rank's figures, float64 `[ranks, figures]`."""
        mine = torch.tensor(list(figures), dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        with named("figures of all ranks"):
            dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts)

    def _collect(self) -> list[int] | None:
        """Wait for the reduction under way and return its result, None without one."""
        if self._under_way is None:
            return None
        pending, figures = self._under_way
        self._under_way = None
        pending.wait()
        return figures.tolist()
