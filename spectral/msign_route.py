"""Names of the kernels that run a stack's products, for the routing table."""

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
    """Describe how msign of a stack runs, for example `plain: kernel 128x128x64`.

    The text names the form of the iteration and the kernel of each symmetric product. If the stack
    is cut into parts that run differently, their descriptions are joined by `; `.

    Args:
        batch, rows, cols: shape of the stack.
        steps, dtype, schedule: of msign; `dtype` is that of its products.
        device: where the stack lies.
        name: name of the device as `spectral.kernels.dispatch.device_name` returns it.

    Raises:
        ValueError: unknown schedule, or `steps < 1`.
    """
    small, large = sorted((rows, cols))
    size = chunk_size(small, large, device)
    parts = {min(size, batch - first) for first in range(0, batch, size)}
    polynomials = coefficients(schedule, steps, dtype)
    return "; ".join(
        dict.fromkeys(_of_part(p, small, large, polynomials, dtype, name) for p in sorted(parts))
    )


def update_route(
    batch: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device, name: str
) -> str | None:
    """Describe the kernel that updates weights within msign's last product in `dtype`.

    Return None where the update is a pass of its own. Only for rules that can end in a product.
    """
    small, large = sorted((rows, cols))
    size = min(batch, chunk_size(small, large, device))
    choice = lookup("finish", size, small, large, _name(dtype), name)
    return None if choice.tile is None else f"in the last product, {choice}"


def pc_route(batch: int, rows: int, cols: int, *, dtype: torch.dtype, name: str) -> str:
    """Describe the kernels of the symmetric products of PC(W) and its gradient.

    `batch`, `rows` and `cols` are the shape of the stack, `dtype` that of its weights.
    """
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
