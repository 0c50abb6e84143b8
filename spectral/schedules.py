"""Polynomial sets of msign: coefficients of successive odd quintic steps, with their sources.

Also what each floating point format can bear. Between the steps singular values reach almost 2,
where the polynomials of Polar Express are steep: a rounding that lifts one above the end
of its interval grows with every further step, until nothing is finite. `Schedule.half_margin` and
`GRAM_GAIN` keep rounding inside: no singular value exceeded 1.007 in a search over 480,480
adversarial matrices.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from .device_values import constant_result

Coefficients = tuple[float, float, float]


@dataclass(frozen=True)
class Schedule:
    """Coefficients of successive steps, and how to continue when more steps are asked for.

    Attributes:
        coefficients: `(a, b, c)` of each step.
        continuation: whether further steps repeat the last one or start over.
        half_margin: factor by which, in 16 bits, all steps but the last let their input exceed its
            interval: `p(s / margin)` instead of `p(s)`. Without it adversarial 2 x 4 matrices
            diverge in bfloat16 (plain form) and float16 (Gram form); with it singular values stay
            bounded even if every rounding is twice that of the format.
    """

    coefficients: tuple[Coefficients, ...]
    continuation: Literal["repeat_last", "cycle"]
    half_margin: float = 1.0

    def take(self, steps: int) -> tuple[Coefficients, ...]:
        """Return the first `steps` coefficients: a prefix, or the set with its continuation."""
        count = len(self.coefficients)
        if self.continuation == "cycle":
            return tuple(self.coefficients[i % count] for i in range(steps))
        return tuple(self.coefficients[min(i, count - 1)] for i in range(steps))


_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)

SCHEDULES: dict[str, Schedule] = {
    # K. Jordan, "Muon", 2024: one polynomial with a large slope at zero; does not converge to 1.
    "simple": Schedule((_SIMPLE,), "cycle"),
    # L. Cesista's optimised coefficients, as used by modded-nanogpt.
    "quintic": Schedule(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "cycle",
    ),
    # "The Polar Express" (arXiv 2505.16932): the eight steps of the SSO paper, with its safety
    # margin.
    "polar_express": Schedule(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "repeat_last",
        half_margin=1.02,
    ),
    # What the Muon of the public SSO code calls polar_express: steeper at zero (slope 20775 instead
    # of 6363).
    "polar_express_upstream": Schedule(
        (
            (7.2086, -15.5131, 9.0178),
            (3.9623, -2.5813, 0.4542),
            (3.9466, -2.5765, 0.4544),
            (3.8991, -2.5671, 0.4566),
            (3.7186, -2.5308, 0.4653),
            (3.1390, -2.3073, 0.4733),
            (2.1715, -1.5246, 0.3885),
            (1.8648, -1.2224, 0.3577),
        ),
        "repeat_last",
        half_margin=1.02,
    ),
    # DeepSeek-V4 report, "hybrid Newton-Schulz": eight steep steps, then two that settle at 1.
    "deepseek": Schedule((_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, "repeat_last"),
}


GRAM_GAIN = {torch.float16: 33.0, torch.float32: 400.0, torch.float64: 400.0}
"""Bound on `M g` between two restarts of the Gram form, by dtype: M the largest singular value up
to the first of them, g the product of the slopes at zero of the steps in between.

A rounding e of the Gram matrix becomes `(M g)^2 e` in its null directions, and one of its factor
`M g e` in all: at most 0.5 and 2% in float16. A dtype that is not listed is not used in Gram form:
bfloat16 would have to restart at every step.
"""


def coefficients(
    schedule: str, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Coefficients, ...]:
    """Return `(a, b, c)` of each step of a schedule; in 16 bits with its `half_margin`.

    Raises:
        ValueError: unknown schedule, or `steps < 1`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    polynomials = SCHEDULES[schedule].take(steps)
    if torch.finfo(dtype).bits >= 32:
        return polynomials
    m = SCHEDULES[schedule].half_margin
    return (*((a / m, b / m**3, c / m**5) for a, b, c in polynomials[:-1]), polynomials[-1])


@constant_result
def restart_steps(steps: tuple[Coefficients, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of completed steps after which the Gram form restarts in `dtype`.

    It restarts before a step that would exceed `GRAM_GAIN`.
    """
    restarts: list[int] = []
    gain = largest = 1.0
    for index, (slope, _, _) in enumerate(steps):
        gain, largest = gain * slope, max(largest, largest_value(steps[:index]))
        if index and gain > GRAM_GAIN[dtype]:
            restarts.append(index)
            gain = slope * largest
    return tuple(restarts)


@constant_result
def largest_value(steps: tuple[Coefficients, ...]) -> float:
    """Return the largest value that the steps make of a singular value in [0, 1]; 1 for none."""
    s = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for a, b, c in steps:
        s = s * (a + s.square() * (b + c * s.square()))
    return float(s.max())
