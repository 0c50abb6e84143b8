"""What a rank does in each part of a run: launches, collectives, and waits of the host."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Any, Final

from training.rehearsal.places import name_of

OTHER: Final = "other"
PLACES: Final[dict[tuple[str, str | None], str]] = {
    ("spectral/rules/muon.py", "accumulate"): "momentum",
    ("spectral/stepping.py", "accumulate"): "momentum",
    ("parallel/optimizer/exchange.py", None): "exchange",
    ("spectral/sharded/exchange.py", None): "exchange",
    ("parallel/optimizer/domain_optimizer.py", "_step_matrices"): "exchange",
    ("parallel/optimizer/domain_optimizer.py", "_fill_weights"): "exchange",
    ("parallel/optimizer/domain_optimizer.py", "_update_kept"): "exchange",
    ("spectral/krylov.py", None): "krylov",
    ("spectral/tangent.py", None): "krylov",
    ("spectral/tangent_model.py", None): "krylov",
    ("spectral/polar.py", None): "products",
    ("spectral/power_iteration.py", None): "power iteration",
    ("spectral/rules/adamw.py", None): "elementwise",
    ("spectral/rules/base.py", None): "update",
    ("spectral/rules/muon.py", None): "update",
    ("spectral/rules/muon_sphere.py", None): "update",
    ("spectral/rules/spectral_sphere.py", None): "update",
    ("spectral/rules/muon_plus_plus.py", None): "update",
    ("spectral/sphere.py", None): "update",
    ("parallel/optimizer/owned_stacks.py", None): "update",
    ("parallel/optimizer/domain_optimizer.py", "_step_regions"): "elementwise",
    ("parallel/optimizer/domain_optimizer.py", "step"): "gather",
    ("parallel/optimizer/materialized_pc.py", None): "PC layers",
    ("spectral/effective_weight.py", None): "PC layers",
    ("parallel/optimizer/optimizer.py", "clip"): "clip",
    ("parallel/optimizer/clip_and_step.py", None): "clip",
}
"""Part by file and function, None for all others of the file. What is not listed, such as copies
and kernels, belongs to the innermost of its callers that is."""


@dataclass
class PartCounts:
    """Sums over a part of a step: launches, bytes that they move, FLOPs, collectives, modelled
    seconds of all of them."""

    launches: int = 0
    moved_bytes: float = 0.0
    flops: float = 0.0
    collectives: int = 0
    seconds: float = 0.0


def part() -> str:
    """Return the part of a step that the caller works for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = name_of(frame.f_code.co_filename)
        if file is not None:
            part_of_step = PLACES.get((file, frame.f_code.co_name)) or PLACES.get((file, None))
            if part_of_step is not None:
                return part_of_step
        frame = frame.f_back
    return OTHER


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
        total: Counts = merged(self, other, lambda a, b: a + times * b)
        peak = other.peak_memory_bytes if times > 0 else 0
        total.peak_memory_bytes = max(self.peak_memory_bytes, peak)
        return total

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


def merged(one: Any, other: Any, number: Callable[[float, float], float]) -> Any:
    """Combine two values of a kind by `number`: records and tables entry by entry, of counters what
    is left."""
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
