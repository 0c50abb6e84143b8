"""The collectives the optimizer uses, counted, under the names this PyTorch has for them."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

from parallel.comm.groups import Axis

Value = TypeVar("Value")

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

# Newer releases of PyTorch renamed the single-tensor collectives and warn about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(RuntimeError):
    """A collective did not come to its end: a rank died, hangs or left."""


@contextlib.contextmanager
def named(kind: str) -> Iterator[None]:
    """Context in which a failing collective raises CollectiveError with its name."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CollectiveError(f"{kind} failed on rank {dist.get_rank()}: {reason}") from error


@dataclass(frozen=True)
class Pending:
    """A collective under way; `wait` returns when its result is there."""

    kind: str
    work: dist.Work

    def wait(self) -> None:
        """Raise CollectiveError with the collective's name if it fails."""
        with named(self.kind):
            self.work.wait()


@dataclass
class Traffic:
    """Bytes this rank has sent per kind of collective, by the ring algorithms' count, and calls."""

    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, size: float) -> None:
        """Count one collective that sends `size` bytes from this rank."""
        self.sent[kind] += int(size)
        self.calls[kind] += 1

    def copy(self) -> Self:
        """The counts as they are now."""
        return type(self)(self.sent.copy(), self.calls.copy())

    def difference(self, before: Self) -> Self:
        """What was counted since `before`."""
        return type(self)(self.sent - before.sent, self.calls - before.calls)

    def include(self, more: Self) -> None:
        """Count what a replayed graph sends without passing here."""
        self.sent.update(more.sent)
        self.calls.update(more.calls)


def reduce_scatter_(flat: Tensor, axis: Axis, traffic: Traffic) -> Pending | None:
    """A handle to wait for; sums `flat` over the axis, in place, into this rank's equal shard."""
    size = flat.numel() // axis.size
    traffic.add("reduce-scatter", size * flat.element_size() * (axis.size - 1))
    if axis.size == 1:
        return None
    shard = flat.narrow(0, axis.rank * size, size)
    with named("reduce-scatter of gradients"):
        work = _reduce_scatter(shard, flat, group=axis.group, async_op=True)
    return Pending("reduce-scatter of gradients", work)


def all_gather_(flat: Tensor, axis: Axis, traffic: Traffic) -> Pending | None:
    """A handle to wait for; fills `flat`, in place, from every rank's equal shard of it."""
    size = flat.numel() // axis.size
    traffic.add("all-gather", size * flat.element_size() * (axis.size - 1))
    if axis.size == 1:
        return None
    shard = flat.narrow(0, axis.rank * size, size)
    with named("all-gather of weights"):
        work = _all_gather(flat, shard, group=axis.group, async_op=True)
    return Pending("all-gather of weights", work)


def all_to_all(
    send: Tensor, receive_counts: list[int], send_counts: list[int], axis: Axis,
    traffic: Traffic, kind: str,
) -> Tensor:  # fmt: skip
    """What every rank sent here, one after the other; `send` holds what goes to each rank."""
    received = send.new_empty(sum(receive_counts))
    own = send_counts[axis.rank]
    traffic.add(kind, (send.numel() - own) * send.element_size())
    with named(kind):
        dist.all_to_all_single(received, send, receive_counts, send_counts, group=axis.group)
    return received


def from_all(value: Value) -> list[Value]:
    """`value` of every rank, in order, on every rank; plain values, for what is no hot path."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_reduce_(
    tensor: Tensor,
    axis: Axis | None,
    traffic: Traffic,
    kind: str,
    op: dist.ReduceOp.RedOpType = SUM,
) -> Tensor:
    """`tensor`, reduced in place over an axis, None for all ranks."""
    size = dist.get_world_size() if axis is None else axis.size
    traffic.add(kind, 2 * tensor.nbytes * (size - 1) / size)
    if size > 1:
        with named(kind):
            dist.all_reduce(tensor, op, group=None if axis is None else axis.group)
    return tensor
