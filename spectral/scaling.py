"""Scale of a unit's update and radius by its shape (SSO paper, eq. 16)."""

import math

MODES = ("spectral_mup", "align_adam_rms", "spectral_kaiming")


def update_scale(shape: tuple[int, int], mode: str) -> float:
    """Compute the factor of the update of a `[rows, cols]` matrix, dimensionless.

    Modes:
        spectral_mup: `sqrt(rows / cols)`; updates change hidden features by the same RMS at every
            width.
        align_adam_rms: `0.2 sqrt(max(rows, cols))`; the update has AdamW's typical RMS of 0.2.
        spectral_kaiming: `sqrt(max(1, rows / cols))`.

    Raises:
        ValueError: unknown mode, or a dimension below 1.
    """
    rows, cols = shape
    if rows < 1 or cols < 1:
        raise ValueError(f"shape must have dimensions of at least 1, got {tuple(shape)}")
    if mode == "spectral_mup":
        return math.sqrt(rows / cols)
    if mode == "align_adam_rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if mode == "spectral_kaiming":
        return math.sqrt(max(1.0, rows / cols))
    raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
