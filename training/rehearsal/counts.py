"""Counts of a rank's launches, collectives and host waits in a part of a run."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Counts:
    """Sums over a part of a run. Places are `name at file:line`.

    launches            number of kernels (including Triton kernels), copies and fills, but not
                        collectives
    collective_bytes    bytes that this rank sends
    host_reads          number of host waits for a value, by place
    synchronizations    number of other host waits for the device, by place
    kernels             number of launches by name
    kernel_seconds      modelled seconds of launches
    sending             modelled seconds of collectives by kind: activations, gradients, weights,
                        exchange (between owners and shards)
    peak_memory_bytes   peak memory in the part
    flops               FLOPs of launches
    elementwise_bytes   bytes moved by launches without FLOPs
    """

    launches: int = 0
    triton_launches: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    kernel_seconds: float = 0.0
    sending: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    host_reads: Counter[str] = field(default_factory=Counter)
    synchronizations: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    elementwise_bytes: float = 0.0
    flops: float = 0.0

    @property
    def modelled_seconds(self) -> float:
        """Modelled seconds of all launches and collectives in sequence."""
        return self.kernel_seconds + sum(self.sending.values())

    @property
    def exposed_seconds(self) -> float:
        """Modelled seconds without gradient reductions and weight gathers, which are overlapped."""
        hidden = self.sending.get("gradients", 0.0) + self.sending.get("weights", 0.0)
        return self.modelled_seconds - hidden

    def add(self, other: "Counts", times: float = 1) -> "Counts":
        """Return the sum of these counts and `times` * `other`.

        The peak memory of `other` is included only if `times` > 0.
        """
        total: Counts = merged(self, other, lambda a, b: a + times * b)
        peak = other.peak_memory_bytes if times > 0 else 0
        total.peak_memory_bytes = max(self.peak_memory_bytes, peak)
        return total

    def as_dict(self) -> dict[str, float]:
        """Return the counts for JSON."""
        return {
            "launches": self.launches,
            "triton_launches": self.triton_launches,
            "collectives": self.collectives,
            "collective_bytes": self.collective_bytes,
            "host_reads": self.host_reads.total(),
            "synchronizations": self.synchronizations.total(),
            "modelled_seconds": self.modelled_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def merged(one: Any, other: Any, number: Callable[[float, float], float]) -> Any:
    """Combine two numbers by `number`, two records or mappings entry by entry; drop zeros in
    counters."""
    if isinstance(one, Counter):
        return +Counter({key: round(number(one[key], other[key])) for key in {*one, *other}})
    if isinstance(one, dict):
        return {
            key: merged(one.get(key, type(v)()), other.get(key, type(v)()), number)
            for key, v in {**one, **other}.items()
        }
    if isinstance(one, int | float):
        value = number(one, other)
        return round(value) if isinstance(one, int) else value
    values = {
        f.name: merged(getattr(one, f.name), getattr(other, f.name), number) for f in fields(one)
    }
    return type(one)(**values)
