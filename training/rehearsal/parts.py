"""Which part of an optimizer's step launches something, by the functions that it is called from."""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Final

from training.rehearsal.places import name_of

OTHER: Final = "other"
PLACES: Final[dict[tuple[str, str | None], str]] = {
    ("spectral/rules/muon.py", "accumulate"): "momentum",
    ("spectral/stepping.py", "accumulate"): "momentum",
    ("parallel/optimizer/exchange.py", None): "exchange",
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
    ("spectral/pc_state.py", None): "PC layers",
    ("parallel/optimizer/optimizer.py", "clip"): "clip",
    ("parallel/optimizer/clip_and_step.py", None): "clip",
}
"""Part by file and function, None for all others of the file. What is not listed, such as copies
and kernels, belongs to the innermost of its callers that is."""

PARTS: Final = tuple(dict.fromkeys([*PLACES.values(), OTHER]))


@dataclass
class PartCounts:
    """Sums over a part of a step: launches, bytes that they move, FLOPs, collectives, modelled
    seconds of all of them."""

    launches: int = 0
    moved_bytes: float = 0.0
    flops: float = 0.0
    collectives: int = 0
    seconds: float = 0.0

    def add(self, other: "PartCounts", times: float = 1) -> "PartCounts":
        """Return the sums of this and `times` the other."""
        return PartCounts(
            round(self.launches + times * other.launches),
            self.moved_bytes + times * other.moved_bytes,
            self.flops + times * other.flops,
            round(self.collectives + times * other.collectives),
            self.seconds + times * other.seconds,
        )


def part() -> str:
    """Return the part of a step that the caller works for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = name_of(frame.f_code.co_filename)
        if file is not None:
            found = PLACES.get((file, frame.f_code.co_name)) or PLACES.get((file, None))
            if found is not None:
                return found
        frame = frame.f_back
    return OTHER
