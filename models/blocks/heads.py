"""Queries, keys and values of the heads from what one linear gives for all of them.

Autograd would write the gradients of the three, rotated and normed, and then copy them into one
tensor for the linear's backward pass; here one function that can be compiled writes that tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.blocks.norm import rms_norm, rms_norm_gradients
from models.blocks.rotary import rotate_halves, rotated


def turned_heads(
    query: Tensor, key: Tensor, turns: Tensor, epsilon: float, *gains: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm heads, if there are gains of queries and keys, and rotate them by their positions.

    `query` `[s, b, groups, heads of one, d]` becomes `[s, b, heads, d]`, `key` `[s, b, groups, 1,
    d]` `[s, b, groups, d]`; `turns` are `[s, 1 or b, 1, 1, 2 d]`.
    """
    if gains:
        query, key = rms_norm(query, gains[0], epsilon), rms_norm(key, gains[1], epsilon)
    query, key = rotate_halves(query, key, turns)
    return query.flatten(2, 3), key.flatten(2, 3)


def heads_gradients(
    query: Tensor, key: Tensor, value: Tensor, turns: Tensor, epsilon: float, *normed: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradient `[s, b, groups, (heads of one + 2) d]` of what the linear gave.

    `query` `[s, b, heads, d]`, `key` and `value` `[s, b, groups, d]` are gradients. `normed` are
    the queries and keys that `turned_heads` was given, and their gains, if it had gains, whose
    gradients follow.
    """
    dq, dk, dv = (x.unflatten(2, (key.shape[2], -1)) for x in (query, key, value))
    cos, sin = turns.to(query.dtype).chunk(2, -1)
    dq, dk = rotated(dq, cos, -sin), rotated(dk, cos, -sin)
    gains = []
    if normed:
        queries, keys, q_gain, k_gain = normed
        dq, dq_gain = rms_norm_gradients(dq, queries, q_gain, epsilon)
        dk, dk_gain = rms_norm_gradients(dk, keys, k_gain, epsilon)
        gains = [dq_gain, dk_gain]
    return torch.cat([dq, dk, dv], 3).flatten(3), *gains


class HeadFunctions(NamedTuple):
    """`turned_heads` and `heads_gradients`, compiled or not; the latter is a kernel too, in
    spectral/kernels/heads.py."""

    forward: Callable[..., tuple[Tensor, Tensor]] = turned_heads
    backward: Callable[..., tuple[Tensor, ...]] = heads_gradients


def split_heads(
    mixed: Tensor,
    turns: Tensor,
    gains: Sequence[Tensor],
    epsilon: float,
    functions: HeadFunctions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[s, b, heads, d]`, keys and values `[s, b, groups, d]`, the first two normed
    by their `gains`, if there are any, and rotated by `turns` `[s, 1 or b, 1, 2 d]`.

    `mixed` is `[s, b, groups, (heads of one + 2) d]`, of each group its queries, key and value.
    """
    options = turns.unsqueeze(2), epsilon, functions
    heads: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(  # type: ignore[no-untyped-call]
        mixed, options, *gains
    )
    return heads


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, options: tuple[Tensor, float, HeadFunctions], *gains: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        turns, epsilon, functions = options
        ctx.options = options
        ctx.save_for_backward(mixed, *gains)
        query, key, value = _parts(mixed, turns.shape[-1] // 2)
        query, key = functions.forward(query, key, turns, epsilon, *gains)
        return query, key, value.squeeze(3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        turns, epsilon, functions = ctx.options
        mixed, *gains = ctx.saved_tensors
        normed = [*_parts(mixed, turns.shape[-1] // 2)[:2], *gains] if gains else []
        whole, *of_gains = functions.backward(*gradients, turns, epsilon, *normed)
        return whole, None, *of_gains


def _parts(mixed: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values `[s, b, groups, n, size]` in `mixed`, views."""
    heads = mixed.unflatten(3, (-1, size))
    return heads[:, :, :, :-2], heads[:, :, :, -2:-1], heads[:, :, :, -1:]
