"""The collectives of training, with counts of sent bytes and errors that name the collective.

`Agreement` combines host values of all ranks during training, such as stop requests and the states
of checkpoint writers. It uses a CPU process group, so no rank waits for a device.
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

# Newer releases of PyTorch renamed the single-tensor collectives and warn about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(RuntimeError):
    """Error for a collective that failed because a rank died, hung or left.

    `absent` maps each missing rank, if known, to its host.
    """

    def __init__(self, text: str, absent: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.absent = dict(absent or {})


@contextlib.contextmanager
def named(kind: str) -> Iterator[None]:
    """Turn errors of collectives within a context into CollectiveError, with `kind` in the
    message."""
    try:
        yield
    except CollectiveError:  # the error already names a collective
        raise
    except RuntimeError as error:
        reason = first_line(error)
        raise CollectiveError(f"{kind} failed on rank {dist.get_rank()}: {reason}") from error


PATIENCE: Final = 5.0
"""Seconds after a rank's error within which all ranks in the same collective get an error."""


def absent_ranks(store: Store, rank: int, size: int) -> dict[int, str]:
    """Return the host of each rank that does not call this function within `PATIENCE` seconds.

    These ranks died, or hang outside collectives. If the store does not respond for another `2 *
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

    # After a network failure a call of the store waits for minutes, despite the store's time-out.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(3 * PATIENCE)
    return {0: os.environ["MASTER_ADDR"]} if asking.is_alive() and rank != 0 else dict(absent)


@dataclass(frozen=True)
class Pending:
    """A running collective."""

    kind: str
    work: dist.Work

    def wait(self) -> None:
        """Wait for the result. Raises CollectiveError if the collective fails."""
        with named(self.kind):
            self.work.wait()


CommVolume = Counter[str]
"""Bytes that this rank has sent, by kind of collective, counted for ring algorithms."""


def reduce_scatter_(flat: Tensor, axis: Axis, comm_volume: CommVolume) -> Pending | None:
    """Start a reduce-scatter of `flat` over the axis, in place into this rank's shard.

    Shards have equal sizes. Returns the pending collective, or None for an axis with one rank.
    """
    shard = _shard(flat, axis, comm_volume, "reduce-scatter")
    return _started("reduce-scatter of gradients", _reduce_scatter, shard, flat, axis)


def all_gather_(flat: Tensor, axis: Axis, comm_volume: CommVolume) -> Pending | None:
    """Start an in-place all-gather of the ranks' shards of `flat`. See `reduce_scatter_`."""
    shard = _shard(flat, axis, comm_volume, "all-gather")
    return _started("all-gather of weights", _all_gather, flat, shard, axis)


def _started(
    kind: str, collective: Callable[..., dist.Work], target: Tensor, source: Tensor, axis: Axis
) -> Pending | None:
    """Start a collective. Return None for an axis with one rank."""
    if axis.size == 1:
        return None
    with named(kind):
        return Pending(kind, collective(target, source, group=axis.group, async_op=True))


def _shard(flat: Tensor, axis: Axis, comm_volume: CommVolume, kind: str) -> Tensor:
    """Return this rank's shard of `flat`, and count the bytes of the other shards."""
    size = flat.numel() // axis.size
    comm_volume[kind] += size * flat.element_size() * (axis.size - 1)
    return flat.narrow(0, axis.rank * size, size)


def all_to_all(
    send: Tensor, receive_counts: list[int], send_counts: list[int], axis: Axis,
    comm_volume: CommVolume, kind: str,
) -> Tensor:  # fmt: skip
    """Exchange elements between all pairs of ranks and return the received elements, by ascending
    rank.

    `send` contains `send_counts[r]` elements for each rank r. `receive_counts[r]` elements are
    received from rank r.
    """
    received = send.new_empty(sum(receive_counts))
    comm_volume[kind] += (send.numel() - send_counts[axis.rank]) * send.element_size()
    with named(kind):
        dist.all_to_all_single(received, send, receive_counts, send_counts, group=axis.group)
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup, kind: str) -> list[Tensor]:
    """Return the tensors of all ranks by ascending rank. Their shapes must be equal."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with named(kind):
        dist.all_gather(tensors, tensor, group=group)
    return tensors


def from_all(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return each rank's picklable `value` on every rank, by ascending rank.

    This call is slow.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    with named("exchange of plain values"):
        dist.all_gather_object(values, value, group=group)
    return values


def found_by_any(findings: Iterable[Value]) -> list[Value]:
    """Return, on every rank, the distinct findings of all ranks. This call is slow."""
    return list(dict.fromkeys(itertools.chain.from_iterable(from_all(list(findings)))))


def on_first(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return each rank's picklable `value` on rank 0, by ascending rank, and [] on other ranks.

    This call is slow.
    """
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
    """Reduce `tensor` in place over an axis (None: all ranks) and return it."""
    size = dist.get_world_size() if axis is None else axis.size
    comm_volume[kind] += 2 * tensor.nbytes * (size - 1) // size
    if size > 1:
        with named(kind):
            dist.all_reduce(tensor, op, group=None if axis is None else axis.group)
    return tensor


SHOWN = 8
"""Largest number of ranks that an error names for each value."""


class Agreement:
    """Element-wise maxima of integers over all ranks.

    All ranks must call the methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._under_way: tuple[Pending, Tensor] | None = None

    def delayed(self, figures: Sequence[int]) -> list[int] | None:
        """Start a reduction of `figures`, and return the maxima of the previous reduction, if any.

        The previous reduction was started one step earlier, so no rank waits for it.
        """
        before = self._collect()
        local = torch.tensor(list(figures), dtype=torch.int64)
        with named("agreement of all ranks"):
            work = dist.all_reduce(local, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._under_way = Pending("agreement of all ranks", work), local
        return before

    def now(self, figures: Sequence[int]) -> list[int]:
        """Return the maxima of `figures` over all ranks. This waits for all ranks.

        The result of a pending reduction is discarded.
        """
        self.delayed(figures)
        result = self._collect()
        assert result is not None  # `delayed` has started it
        return result

    def gather(self, figures: Sequence[float]) -> Tensor:
        """Return `figures` of every rank, float64 `[ranks, figures]`."""
        local = torch.tensor(list(figures), dtype=torch.float64)
        return torch.stack(gather(local, self.group, "figures of all ranks"))

    def _collect(self) -> list[int] | None:
        """Wait for the pending reduction and return its result, or None if none is pending."""
        if self._under_way is None:
            return None
        pending, figures = self._under_way
        self._under_way = None
        pending.wait()
        return figures.tolist()


def disagreements(facts: Mapping[str, object]) -> list[str]:
    """Return, on every rank, a sentence for each fact that differs between ranks.

    All ranks must call this function together. Facts are sent only if their hashes differ.
    """
    with named("comparison of all ranks' settings"):
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
        if len(set(from_all(digest))) == 1:
            return []
        facts_by_rank = from_all((socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in facts_by_rank]
    return list(differing([facts for _, facts in facts_by_rank], hosts))


def differing(facts: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a message for each differing fact, with the ranks that differ from the majority.

    `facts` and `hosts` have an entry per rank.
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
    """Return the first few ranks with their hosts."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:SHOWN]) + more
