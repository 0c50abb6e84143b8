"""Collectives for training. They count the bytes sent, and their errors name the failed collective.

During training, `Agreement` reduces host values, such as stop requests and the status of checkpoint
writers, across ranks. `Agreement` uses a CPU process group, so it never synchronizes with the
device.
"""

import contextlib
import hashlib
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from parallel.comm.groups import Axis
from parallel.error_text import first_line
from spectral.batching import grouped

Value = TypeVar("Value")

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

# Newer PyTorch releases rename the single-tensor collectives and deprecate the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(RuntimeError):
    """Raised when a collective fails because a rank died, hung or left.

    `absent` maps the missing ranks, if known, to their hosts.
    """

    def __init__(self, text: str, absent: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.absent = dict(absent or {})


@contextlib.contextmanager
def collective_errors(kind: str) -> Iterator[None]:
    """Context manager that reraises collective errors as CollectiveError, with `kind` in the
    message."""
    try:
        yield
    except CollectiveError:  # the error already names a collective
        raise
    except RuntimeError as error:
        reason = first_line(error)
        raise CollectiveError(f"{kind} failed on rank {dist.get_rank()}: {reason}") from error


PATIENCE: Final = 5.0
"""Seconds to wait for the other ranks to report that their collective has failed, too."""


def absent_ranks(store: Store, rank: int, size: int) -> dict[int, str]:
    """Return the hosts of all ranks that do not call this function within `PATIENCE` seconds.

    Such ranks have died or hang outside collectives. If the store does not respond for another `2 *
    PATIENCE` seconds, rank 0 is considered absent, because its node runs the store. Returns {} if
    the store no longer exists.
    """
    absent: dict[int, str] = {}

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            store.set(f"failed/{rank}", "")
            time.sleep(PATIENCE)
            silent = [other for other in range(size) if not store.check([f"failed/{other}"])]
            absent.update({other: store.get(f"host/{other}").decode() for other in silent})

    # After a network failure, a store call blocks for minutes, regardless of the store's timeout.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(3 * PATIENCE)
    return {0: os.environ["MASTER_ADDR"]} if asking.is_alive() and rank != 0 else dict(absent)


@dataclass(frozen=True)
class Pending:
    """A collective in flight."""

    kind: str
    work: dist.Work

    def wait(self) -> None:
        """Wait for the collective to complete. Raises CollectiveError if it fails."""
        with collective_errors(self.kind):
            self.work.wait()


CommVolume = Counter[str]
"""Bytes sent by this rank for each kind of collective, assuming ring algorithms."""


def reduce_scatter_(flat: Tensor, axis: Axis, comm_volume: CommVolume) -> Pending | None:
    """Start a reduce-scatter of `flat` over the axis. The result overwrites this rank's shard of
    `flat`.

    All shards have the same size. Returns the pending collective, or None if the axis has one rank.
    """
    shard = _shard(flat, axis, comm_volume, "reduce-scatter")
    return _started("reduce-scatter of gradients", _reduce_scatter, shard, flat, axis)


def all_gather_(flat: Tensor, axis: Axis, comm_volume: CommVolume) -> Pending | None:
    """Start an in-place all-gather of the shards of `flat`. See `reduce_scatter_`."""
    shard = _shard(flat, axis, comm_volume, "all-gather")
    return _started("all-gather of weights", _all_gather, flat, shard, axis)


def _started(
    kind: str, collective: Callable[..., dist.Work], target: Tensor, source: Tensor, axis: Axis
) -> Pending | None:
    """Start a collective, or return None if the axis has one rank."""
    if axis.size == 1:
        return None
    with collective_errors(kind):
        return Pending(kind, collective(target, source, group=axis.group, async_op=True))


def _shard(flat: Tensor, axis: Axis, comm_volume: CommVolume, kind: str) -> Tensor:
    """Return this rank's shard of `flat`, and count the other shards as bytes sent."""
    size = flat.numel() // axis.size
    comm_volume[kind] += size * flat.element_size() * (axis.size - 1)
    return flat.narrow(0, axis.rank * size, size)


def all_to_all(
    send: Tensor, receive_counts: list[int], send_counts: list[int], axis: Axis,
    comm_volume: CommVolume, kind: str,
) -> Tensor:  # fmt: skip
    """Run an all-to-all and return the received elements, in rank order.

    `send` contains `send_counts[r]` elements for each rank r, and `receive_counts[r]` elements are
    received from rank r.
    """
    received = send.new_empty(sum(receive_counts))
    comm_volume[kind] += (send.numel() - send_counts[axis.rank]) * send.element_size()
    with collective_errors(kind):
        dist.all_to_all_single(received, send, receive_counts, send_counts, group=axis.group)
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup, kind: str) -> list[Tensor]:
    """All-gather `tensor`, whose shape must be the same on all ranks. Results are in rank order."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with collective_errors(kind):
        dist.all_gather(tensors, tensor, group=group)
    return tensors


def from_all(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """All-gather a picklable `value`, and return all values in rank order. Slow."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with collective_errors("exchange of plain values"):
        dist.all_gather_object(values, value, group=group)
    return values


def found_by_any(findings: Iterable[Value]) -> list[Value]:
    """Return, on every rank, the distinct findings of all ranks. Slow."""
    return list(dict.fromkeys(itertools.chain.from_iterable(from_all(list(findings)))))


def on_first(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks in rank order, on rank 0 only; other ranks get []. Slow."""
    first = dist.get_rank() == 0
    values: list[Any] = [None] * dist.get_world_size() if first else []
    with collective_errors("exchange of plain values"):
        dist.gather_object(value, values if first else None, group=group)
    return values


def all_reduce_(
    tensor: Tensor,
    axis: Axis | None,
    comm_volume: CommVolume,
    kind: str,
    op: dist.ReduceOp.RedOpType = SUM,
) -> Tensor:
    """Reduce `tensor` in place over an axis (None: all ranks) and return it."""
    size = dist.get_world_size() if axis is None else axis.size
    comm_volume[kind] += 2 * tensor.nbytes * (size - 1) // size
    if size > 1:
        with collective_errors(kind):
            dist.all_reduce(tensor, op, group=None if axis is None else axis.group)
    return tensor


SHOWN = 8
"""Maximum number of ranks an error lists for each value."""


class Agreement:
    """Computes elementwise maxima of integers across ranks.

    All ranks must call the methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._under_way: tuple[Pending, Tensor] | None = None

    def delayed(self, figures: Sequence[int]) -> list[int] | None:
        """Start a reduction of `figures`, and return the maxima from the previous call, if any.

        The previous reduction has had a whole step to complete, so no rank has to wait for it.
        """
        before = self._collect()
        local = torch.tensor(list(figures), dtype=torch.int64)
        with collective_errors("agreement of all ranks"):
            work = dist.all_reduce(local, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._under_way = Pending("agreement of all ranks", work), local
        return before

    def now(self, figures: Sequence[int]) -> list[int]:
        """Return the maxima of `figures` across ranks. Blocks until all ranks have called this
        method.

        The result of a pending reduction is discarded.
        """
        self.delayed(figures)
        result = self._collect()
        assert result is not None  # `delayed` has started it
        return result

    def gather(self, figures: Sequence[float]) -> Tensor:
        """Return the `figures` of all ranks as a float64 tensor `[ranks, figures]`."""
        local = torch.tensor(list(figures), dtype=torch.float64)
        return torch.stack(gather(local, self.group, "figures of all ranks"))

    def _collect(self) -> list[int] | None:
        """Wait for the pending reduction and return its result, or None if there is none."""
        if self._under_way is None:
            return None
        pending, figures = self._under_way
        self._under_way = None
        pending.wait()
        return figures.tolist()


def disagreements(facts: Mapping[str, object]) -> list[str]:
    """Return, on every rank, a message for each fact that differs between ranks.

    Collective: all ranks must call this function. The facts themselves are only sent if their
    hashes differ.
    """
    with collective_errors("comparison of all ranks' settings"):
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
        if len(set(from_all(digest))) == 1:
            return []
        facts_by_rank = from_all((socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in facts_by_rank]
    return list(differing([facts for _, facts in facts_by_rank], hosts))


def differing(facts: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a message for each fact that differs, naming the ranks that deviate from the majority.

    `facts` and `hosts` have one entry per rank.
    """
    for key in dict.fromkeys(key for rank_facts in facts for key in rank_facts):
        values = [repr(rank_facts[key]) if key in rank_facts else "absent" for rank_facts in facts]
        ranks = grouped(range(len(facts)), values.__getitem__)
        if len(ranks) == 1:
            continue
        usual = max(ranks, key=lambda value: len(ranks[value]))
        parts = [
            f"{value} on {_named(members, hosts)}"
            for value, members in ranks.items()
            if value != usual or len(members) == 1
        ]
        if len(ranks[usual]) > 1:
            parts.append(f"{usual} on the other {len(ranks[usual])} ranks")
        yield f"{key} differs between ranks: {', '.join(parts)}"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format a list of ranks with their hosts, truncated to `SHOWN` ranks."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:SHOWN]) + more
