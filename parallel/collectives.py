"""The collectives the optimizer uses, counted, under the names this PyTorch has for them."""

from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from parallel.groups import Axis

# Newer releases of PyTorch renamed the single-tensor collectives and warn about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """Bytes this rank has sent per kind of collective, by the ring algorithms' count, and calls."""

    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, size: float) -> None:
        """None; counts one collective that sends `size` bytes from this rank."""
        self.sent[kind] += int(size)
        self.calls[kind] += 1


def reduce_scatter_(flat: Tensor, axis: Axis, traffic: Traffic) -> dist.Work | None:
    """A handle to wait for; sums `flat` over the axis, in place, into this rank's equal shard."""
    size = flat.numel() // axis.size
    traffic.add("reduce-scatter", size * flat.element_size() * (axis.size - 1))
    if axis.size == 1:
        return None
    return _reduce_scatter(
        flat.narrow(0, axis.rank * size, size), flat, group=axis.group, async_op=True
    )


def all_gather_(flat: Tensor, axis: Axis, traffic: Traffic) -> dist.Work | None:
    """A handle to wait for; fills `flat`, in place, from every rank's equal shard of it."""
    size = flat.numel() // axis.size
    traffic.add("all-gather", size * flat.element_size() * (axis.size - 1))
    if axis.size == 1:
        return None
    return _all_gather(
        flat, flat.narrow(0, axis.rank * size, size), group=axis.group, async_op=True
    )


def all_to_all(
    send: Tensor, receive_counts: list[int], send_counts: list[int], axis: Axis,
    traffic: Traffic, kind: str,
) -> Tensor:  # fmt: skip
    """What every rank sent here, one after the other; `send` holds what goes to each rank."""
    received = send.new_empty(sum(receive_counts))
    own = send_counts[axis.rank]
    traffic.add(kind, (send.numel() - own) * send.element_size())
    dist.all_to_all_single(received, send, receive_counts, send_counts, group=axis.group)
    return received
