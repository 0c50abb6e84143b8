"""The collectives that training uses, with their volume counted and their failures named."""

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from parallel.comm.groups import Axis
from parallel.errors import first_line

Value = TypeVar("Value")

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

# Newer releases of PyTorch renamed the single-tensor collectives and warn about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(RuntimeError):
    """A collective failed because a rank died, hangs or left.

    `absent` has the host of each rank that did not come to it, as far as they are known.
    """

    def __init__(self, text: str, absent: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.absent = dict(absent or {})


@contextlib.contextmanager
def named(kind: str) -> Iterator[None]:
    """Context in which a failing collective raises CollectiveError naming `kind`."""
    try:
        yield
    except CollectiveError:  # a collective within, which is named already
        raise
    except RuntimeError as error:
        reason = first_line(error)
        raise CollectiveError(f"{kind} failed on rank {dist.get_rank()}: {reason}") from error


PATIENCE: Final = 5.0
"""Seconds in which every rank that waited in the same collective has failed as well."""


def absent_ranks(store: Store, rank: int, size: int) -> dict[int, str]:
    """Return the host of each rank that does not call this within `PATIENCE` seconds.

    They died, or hang elsewhere than in a collective. A store that stays silent for twice as long
    counts as rank 0, on whose node it is. {} if the store is gone.
    """
    absent: dict[int, str] = {}

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            store.set(f"failed/{rank}", "")
            time.sleep(PATIENCE)
            silent = [other for other in range(size) if not store.check([f"failed/{other}"])]
            absent.update({other: store.get(f"host/{other}").decode() for other in silent})

    # Where a link was cut a call of the store waits for minutes, whatever its time-out is.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(3 * PATIENCE)
    return {0: os.environ["MASTER_ADDR"]} if asking.is_alive() and rank != 0 else dict(absent)


@dataclass(frozen=True)
class Pending:
    """A collective under way."""

    kind: str
    work: dist.Work

    def wait(self) -> None:
        """Wait for the result. Raises CollectiveError if the collective fails."""
        with named(self.kind):
            self.work.wait()


CommVolume = Counter[str]
"""Bytes that this rank has sent, by kind of collective, counted for ring algorithms."""


def reduce_scatter_(flat: Tensor, axis: Axis, comm_volume: CommVolume) -> Pending | None:
    """Start to sum `flat` over the axis, in place, into this rank's shard.

    The shards are equal. Returns what to wait for, None on an axis of one rank.
    """
    shard = _shard(flat, axis, comm_volume, "reduce-scatter")
    return _started("reduce-scatter of gradients", _reduce_scatter, shard, flat, axis)


def all_gather_(flat: Tensor, axis: Axis, comm_volume: CommVolume) -> Pending | None:
    """Start to fill `flat`, in place, from every rank's shard of it; as `reduce_scatter_`."""
    shard = _shard(flat, axis, comm_volume, "all-gather")
    return _started("all-gather of weights", _all_gather, flat, shard, axis)


def _started(
    kind: str, collective: Callable[..., dist.Work], target: Tensor, source: Tensor, axis: Axis
) -> Pending | None:
    """Start a collective; None on an axis of one rank."""
    if axis.size == 1:
        return None
    with named(kind):
        return Pending(kind, collective(target, source, group=axis.group, async_op=True))


def _shard(flat: Tensor, axis: Axis, comm_volume: CommVolume, kind: str) -> Tensor:
    """Return this rank's shard of `flat`, and count the bytes of the others."""
    size = flat.numel() // axis.size
    comm_volume[kind] += size * flat.element_size() * (axis.size - 1)
    return flat.narrow(0, axis.rank * size, size)


def all_to_all(
    send: Tensor, receive_counts: list[int], send_counts: list[int], axis: Axis,
    comm_volume: CommVolume, kind: str,
) -> Tensor:  # fmt: skip
    """Exchange elements between all pairs of ranks and return those received, by ascending rank.

    `send` holds `send_counts[r]` elements for each rank r, and `receive_counts[r]` come from it.
    """
    received = send.new_empty(sum(receive_counts))
    comm_volume[kind] += (send.numel() - send_counts[axis.rank]) * send.element_size()
    with named(kind):
        dist.all_to_all_single(received, send, receive_counts, send_counts, group=axis.group)
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup, kind: str) -> list[Tensor]:
    """Return every rank's `tensor`, of one shape, by ascending rank."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with named(kind):
        dist.all_gather(tensors, tensor, group=group)
    return tensors


def from_all(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Gather a picklable `value` of every rank on every rank, by ascending rank. Slow."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with named("exchange of plain values"):
        dist.all_gather_object(values, value, group=group)
    return values


def found_by_any(findings: Iterable[Value]) -> list[Value]:
    """Return the findings of all ranks on every rank, equal ones once. Slow."""
    return list(dict.fromkeys(itertools.chain.from_iterable(from_all(list(findings)))))


def on_first(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Gather a picklable `value` of every rank on rank 0, by ascending rank; [] elsewhere. Slow."""
    first = dist.get_rank() == 0
    values: list[Any] = [None] * dist.get_world_size() if first else []
    with named("exchange of plain values"):
        dist.gather_object(value, values if first else None, group=group)
    return values


def all_reduce_(
    tensor: Tensor,
    axis: Axis | None,
    comm_volume: CommVolume,
    kind: str,
    op: dist.ReduceOp.RedOpType = SUM,
) -> Tensor:
    """Reduce `tensor` in place over an axis, None for all ranks, and return it."""
    size = dist.get_world_size() if axis is None else axis.size
    comm_volume[kind] += 2 * tensor.nbytes * (size - 1) // size
    if size > 1:
        with named(kind):
            dist.all_reduce(tensor, op, group=None if axis is None else axis.group)
    return tensor
