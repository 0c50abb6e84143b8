"""Polynomial sets of msign: coefficients of successive odd quintic steps, with their sources."""

from dataclasses import dataclass
from typing import Literal

import torch

Coefficients = tuple[float, float, float]


@dataclass(frozen=True)
class Schedule:
    """Coefficients of successive steps, and how to continue when more steps are asked for.

    Attributes:
        coefficients: `(a, b, c)` of each step.
        continuation: whether further steps repeat the last one or start over.
        gram_steps: largest number of steps for which the Gram form in 16 bits is as accurate as
            the plain form up to a small factor, measured on recorded momenta (docs/numerics.md);
            None means any number. Beyond it the Gram form is not used: it diverges where the
            polynomials leave no margin above 1 or amplify rounding for too many steps.
    """

    coefficients: tuple[Coefficients, ...]
    continuation: Literal["repeat_last", "cycle"]
    gram_steps: int | None = None

    def take(self, steps: int) -> tuple[Coefficients, ...]:
        """Return the first `steps` coefficients: a prefix, or the set with its continuation."""
        count = len(self.coefficients)
        if self.continuation == "cycle":
            return tuple(self.coefficients[i % count] for i in range(steps))
        return tuple(self.coefficients[min(i, count - 1)] for i in range(steps))


_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)

SCHEDULES: dict[str, Schedule] = {
    # K. Jordan, "Muon", 2024: one polynomial with a large slope at zero; does not converge to 1.
    "simple": Schedule((_SIMPLE,), "cycle", gram_steps=5),
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
        gram_steps=5,
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
        gram_steps=4,
    ),
    # T. Boissin, "flash-newton-schulz": the four steps tuned for AOL-preconditioned input.
    "aol": Schedule(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "cycle",
        gram_steps=4,
    ),
    # Chebyshev-type optimal odd polynomials (CANS, arXiv 2506.10935, algorithm 1), five steps.
    "cans": Schedule(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "repeat_last",
        gram_steps=0,
    ),
    # DeepSeek-V4 report, "hybrid Newton-Schulz": eight steep steps, then two that settle at 1.
    "deepseek": Schedule((_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, "repeat_last", gram_steps=5),
}


def coefficients(schedule: str, steps: int) -> tuple[Coefficients, ...]:
    """Return `(a, b, c)` of each step of a schedule.

    Raises:
        ValueError: unknown schedule, or `steps < 1`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return SCHEDULES[schedule].take(steps)


def allows_gram(steps: tuple[Coefficients, ...], dtype: torch.dtype) -> bool:
    """Return whether the Gram form is accurate in `dtype` for these polynomials.

    In 16 bits it is accurate for a schedule of `SCHEDULES` within its `gram_steps`, and for no
    other polynomials.
    """
    if torch.finfo(dtype).bits >= 32:
        return True
    count = len(steps)
    return any(
        schedule.take(count) == steps
        for schedule in SCHEDULES.values()
        if schedule.gram_steps is None or count <= schedule.gram_steps
    )
