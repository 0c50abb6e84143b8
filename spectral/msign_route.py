"""The ways that an owner's products go for a stack of matrices, in words: for the routing table."""

import torch

from spectral.kernels.dispatch import PRODUCTS, lookup
from spectral.polar import chunk_size, prefers_gram
from spectral.schedules import Coefficients, coefficients


def msign_route(
    batch: int,
    rows: int,
    cols: int,
    *,
    steps: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    schedule: str = "polar_express",
) -> str:
    """The form of the iteration and the ways of its symmetric products, e.g. `plain: kernel
    128x128x64`; several, joined by `; `, if the stack is cut into parts that go different ways.

    `name` is the device's, as `spectral.kernels.dispatch.device_name` gives it.
    """
    small, large = sorted((rows, cols))
    size = chunk_size(small, large, device)
    parts = {min(size, batch - first) for first in range(0, batch, size)}
    polynomials = coefficients(schedule, steps)
    return "; ".join(
        dict.fromkeys(_of_part(p, small, large, polynomials, dtype, name) for p in sorted(parts))
    )


def update_route(
    batch: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device, name: str
) -> str | None:
    """The kernel by which weights are updated in msign's last product in `dtype`, for rules that
    can; None where the update is a pass of its own."""
    small, large = sorted((rows, cols))
    size = min(batch, chunk_size(small, large, device))
    choice = lookup("finish", size, small, large, _name(dtype), name)
    return None if choice.tile is None else f"in the last product, {choice}"


def precondition_route(batch: int, rows: int, cols: int, *, dtype: torch.dtype, name: str) -> str:
    """The ways of the symmetric products of PC(W) and its gradient, of weights in `dtype`."""
    small, large = sorted((rows, cols))
    kind = _name(torch.promote_types(dtype, torch.float32))
    ways = {
        "gram": lookup("gram", batch, small, large, kind, name),
        "commuting": lookup("commuting", batch, small, small, kind, name),
    }
    return ", ".join(f"{each} {way}" for each, way in ways.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_part(
    batch: int,
    rows: int,
    cols: int,
    steps: tuple[Coefficients, ...],
    dtype: torch.dtype,
    device: str,
) -> str:
    gram = prefers_gram(rows, cols, steps, dtype)
    used = [name for name in PRODUCTS if gram or name != "commuting"]
    kind = _name(dtype)
    ways = {
        each: str(lookup(each, batch, rows, cols if each == "gram" else rows, kind, device))
        for each in used
    }
    distinct = set(ways.values())
    if len(distinct) == 1:
        return f"{'gram' if gram else 'plain'}: {distinct.pop()}"
    listed = ", ".join(f"{each} {way}" for each, way in ways.items())
    return f"{'gram' if gram else 'plain'}: {listed}"
