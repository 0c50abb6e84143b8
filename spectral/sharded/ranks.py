"""The ranks that share matrices, and the collectives among them."""

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class RankGroup:
    """A group of ranks, numbered from 0, and what this rank has sent to the others.

    Attributes:
        ranks: global ranks of the members, in the group's order.
        rank, size: number of this rank within the group, and of its members.
        sent: bytes that this rank has sent to other ranks in exchanges.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.size = len(self.ranks)
        self.sent = 0

    def all_to_all(self, send: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
        """Exchange elements between all pairs of ranks; see `exchange.AllToAll`."""
        received = send.new_empty(sum(receive_counts))
        self.sent += (send.numel() - send_counts[self.rank]) * send.element_size()
        dist.all_to_all_single(received, send, receive_counts, send_counts, group=self.group)
        return received

    def all_true(self, flag: Tensor) -> Tensor:
        """Return whether `flag`, a 0-d bool, is true on every rank."""
        value = flag.to(torch.int32)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.group)
        return value > 0

    def agree(self, flag: bool, value: int, device: torch.device) -> tuple[bool, bool]:
        """Return whether `flag` is true on every rank, and whether every rank passes the same
        `value`; waits for the device."""
        figures = torch.tensor([flag, value, -value], dtype=torch.int64, device=device)
        dist.all_reduce(figures, dist.ReduceOp.MIN, group=self.group)
        least, smallest, largest = figures.tolist()
        return least > 0, smallest == -largest


@functools.cache
def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a device mesh; every member calls this together."""
    if mesh.ndim == 1:
        own: dist.ProcessGroup = mesh.get_group()
        return own
    ranks = sorted(mesh.mesh.flatten().tolist())
    world: dist.ProcessGroup | None = dist.group.WORLD
    if world is not None and ranks == list(range(dist.get_world_size())):
        return world
    group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
    if group is None:
        raise RuntimeError(f"this rank is not a member of the device mesh {mesh}")
    return group
