"""What a rank does in each part of a run: launches, collectives, and waits of the host."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from training.rehearsal.parts import PartCounts


@dataclass
class Counts:
    """Sums over some part of a run. Places are `name at file:line`.

    launches            kernels, copies and fills, Triton's among them; collectives are apart
    collective_bytes    that this rank sends
    host_reads          values that the host waits for, by place
    synchronizations    other waits of the host for the device, by place
    kernels             launches by name
    kernel_seconds      modelled
    sending             modelled seconds of collectives: of activations, gradients and weights, and
                        of the exchange between owners and shards
    peak_memory_bytes   the most memory at one moment of it
    parts               of an optimizer's step
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
    parts: dict[str, PartCounts] = field(default_factory=dict)

    def part(self, name: str) -> PartCounts:
        """Return the sums of a part, to be added to."""
        return self.parts.setdefault(name, PartCounts())

    @property
    def modelled_seconds(self) -> float:
        """Seconds of all launches and collectives, one after the other."""
        return self.kernel_seconds + sum(self.sending.values())

    @property
    def exposed_seconds(self) -> float:
        """Seconds without the reduction of gradients and the gather of weights, which others
        hide."""
        hidden = self.sending.get("gradients", 0.0) + self.sending.get("weights", 0.0)
        return self.modelled_seconds - hidden

    def add(self, other: "Counts", times: float = 1) -> "Counts":
        """Return the sums of this and `times` the other, whose peak counts if that is more than
        0."""
        return Counts(
            round(self.launches + times * other.launches),
            round(self.triton_launches + times * other.triton_launches),
            round(self.collectives + times * other.collectives),
            round(self.collective_bytes + times * other.collective_bytes),
            self.kernel_seconds + times * other.kernel_seconds,
            _seconds(self.sending, other.sending, times),
            max(self.peak_memory_bytes, other.peak_memory_bytes if times > 0 else 0),
            _sum(self.host_reads, other.host_reads, times),
            _sum(self.synchronizations, other.synchronizations, times),
            _sum(self.kernels, other.kernels, times),
            {
                name: PartCounts()
                .add(self.parts.get(name, PartCounts()))
                .add(other.parts.get(name, PartCounts()), times)
                for name in {**self.parts, **other.parts}
            },
        )

    def as_dict(self) -> dict[str, float]:
        """Return the figures of a phase, as JSON holds them."""
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


def _sum(one: Counter[str], other: Counter[str], times: float) -> Counter[str]:
    """Counts of `one` and `times` those of `other`, of what is left of either."""
    found = {key: round(one[key] + times * other[key]) for key in {*one, *other}}
    return Counter({key: count for key, count in found.items() if count > 0})


def _seconds(
    one: Mapping[str, float], other: Mapping[str, float], times: float
) -> dict[str, float]:
    """Seconds of `one` and `times` those of `other`."""
    return {key: one.get(key, 0.0) + times * other.get(key, 0.0) for key in {*one, *other}}
