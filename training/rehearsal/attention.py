"""The attention kernel that PyTorch would take on a GPU, which a machine without one cannot say."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from training.rehearsal.replacement import put, replace

LARGEST_FLASH_HEAD = 256
ALIGNMENT = 8
LOWER_RIGHT = 2
"""The kernels' name of a causal mask that ends with the last query and the last key."""


@dataclass(frozen=True)
class LowerRight:
    """A causal mask that ends with the last of `queries` and of `keys`; PyTorch's own is a tensor
    of a kind that fake tensors do not know."""

    queries: int
    keys: int


def install() -> None:
    """Replace `scaled_dot_product_attention` and the choice of its kernel, for the life of this
    process."""
    put(F, "scaled_dot_product_attention", attention)
    put(torch, "_fused_sdp_choice", choice)
    replace(causal_lower_right, LowerRight)


def takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention takes these: 16 bits, heads of one size up to 256."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    return query.dtype.itemsize == 2 and len(sizes) == 1 and max(sizes) <= LARGEST_FLASH_HEAD


def choice(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
    """Return the kernel's number in `SDPBackend`."""
    if takes_flash(query, key, value):
        return int(SDPBackend.FLASH_ATTENTION.value)
    return int(SDPBackend.EFFICIENT_ATTENTION.value)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | LowerRight | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What the fused kernels return for queries `[batch, heads, s, d]`, keys and values `[batch,
    groups, t, d]`. Raises RuntimeError for what none of them takes."""
    lower_right = isinstance(attn_mask, LowerRight)
    if attn_mask is not None and not lower_right:
        raise RuntimeError("a mask in memory keeps attention from the fused kernels")
    if takes_flash(query, key, value):
        return _flash(query, key, value, dropout_p, is_causal or lower_right, scale)
    if enable_gqa and query.shape[1] != key.shape[1]:
        raise RuntimeError("No available kernel: grouped heads, and flash attention takes them not")
    if lower_right:
        return _efficient_lower_right(query, key, value, dropout_p, scale)
    wanted = query.requires_grad and torch.is_grad_enabled()
    found: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, wanted, dropout_p, is_causal, scale=scale
    )[0]
    return found


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Flash attention, heads padded as it wants them."""
    size = query.shape[-1]
    room = -size % ALIGNMENT
    if room:
        query, key, value = (F.pad(x, (0, room)) for x in (query, key, value))
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale or size**-0.5
    )[0]
    return found[..., :size]


def _efficient_lower_right(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Memory-efficient attention under a causal mask that ends with the last query."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    found: Tensor = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, None, None, None, None, dropout, LOWER_RIGHT, True, scale=scale
    )[0]
    return found.transpose(1, 2)
