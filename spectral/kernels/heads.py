"""Triton kernel for the backward pass of attention heads: rotary embedding, norms and QKV layout.

Attention's backward pass returns separate gradients of the rotated queries, rotated keys and
values. The QKV projection needs these gradients in one tensor, in which each group's queries, key
and value are adjacent. The kernel undoes the rotations, backpropagates through the heads' RMSNorms,
if any, and writes this tensor. The kernel reads each gradient and each normalized head once. The
reference is `heads_gradients` in models/blocks/self_attention.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16
"""Number of heads per program iteration."""
TOKENS = 8
"""Number of tokens per program; each program writes one row of partial sums of gain gradients."""
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def turn_back(  # type: ignore[no-untyped-def]
    gradient, g_head, heads, x, x_group, x_head, gain, target, width, each, heads_of_group, size,
    epsilon, cos, low_cos, sin, low_sin, sums, low_sums,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `each` heads of one token, and accumulate the gain's gradient.

    The two halves of a head are loaded separately because the rotation mixes them.
    """
    half = size // 2
    i = tl.arange(0, HALF)[None, :]
    for first in range(0, each, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < each) & (i < half)
        group, place = head // heads_of_group, head % heads_of_group
        source = gradient + head * g_head + i
        given = tl.load(source, mask=inside, other=0.0).to(WIDE)
        low_given = tl.load(source + half, mask=inside, other=0.0).to(WIDE)
        found = given * cos - low_given * sin
        low_found = low_given * low_cos - given * low_sin
        if NORMED:
            source = heads + x + group * x_group + place * x_head + i
            normed = tl.load(source, mask=inside, other=0.0).to(WIDE)
            low_normed = tl.load(source + half, mask=inside, other=0.0).to(WIDE)
            square = tl.sum(normed * normed + low_normed * low_normed, axis=1)[:, None]
            scale = 1 / tl.sqrt(square / size + epsilon)
            normed, low_normed = normed * scale, low_normed * scale
            sums += tl.sum(found * normed, axis=0)[None, :]
            low_sums += tl.sum(low_found * low_normed, axis=0)[None, :]
            found *= tl.load(gain + i, mask=i < half, other=0.0).to(WIDE)
            low_found *= tl.load(gain + half + i, mask=i < half, other=0.0).to(WIDE)
            inner = tl.sum(found * normed + low_found * low_normed, axis=1)[:, None] / size
            found = scale * (found - normed * inner)
            low_found = scale * (low_found - low_normed * inner)
        goal = target + group * width + place * size + i
        tl.store(goal, found.to(target.dtype.element_ty), mask=inside)
        tl.store(goal + half, low_found.to(target.dtype.element_ty), mask=inside)
    return sums, low_sums


@triton.jit  # type: ignore[untyped-decorator]
def heads_kernel(  # type: ignore[no-untyped-def]
    query, key, value, turns, queries, keys, q_gain, k_gain, out, q_sums, k_sums,
    tokens, batch, groups, ratio, size, epsilon,
    q_s, q_b, q_head, k_s, k_b, k_head, v_s, v_b, v_head,
    x_s, x_b, x_group, x_head, t_s, t_b,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradients for `TOKENS` tokens, `[groups, (ratio + 2) size]` per token."""
    half, width = size // 2, (ratio + 2) * size
    i = tl.arange(0, HALF)[None, :]
    queried, low_queried = tl.zeros((1, HALF), WIDE), tl.zeros((1, HALF), WIDE)
    keyed, low_keyed = tl.zeros((1, HALF), WIDE), tl.zeros((1, HALF), WIDE)
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    for token in range(begin, tl.minimum(begin + TOKENS, tokens)):
        s, b = token // batch, token % batch
        # Round cosines and sines as in the forward pass.
        turn = turns + s * t_s + b * t_b + i
        narrow: tl.constexpr = out.dtype.element_ty
        cos = tl.load(turn, mask=i < half, other=0.0).to(narrow).to(WIDE)
        low_cos = tl.load(turn + half, mask=i < half, other=0.0).to(narrow).to(WIDE)
        sin = tl.load(turn + size, mask=i < half, other=0.0).to(narrow).to(WIDE)
        low_sin = tl.load(turn + size + half, mask=i < half, other=0.0).to(narrow).to(WIDE)
        target = out + token * groups * width
        x = s * x_s + b * x_b
        queried, low_queried = turn_back(
            query + s * q_s + b * q_b, q_head, queries, x, x_group, x_head, q_gain, target, width,
            groups * ratio, ratio, size, epsilon, cos, low_cos, sin, low_sin, queried, low_queried,
            NORMED, WIDE, HEADS, HALF,
        )  # fmt: skip
        keyed, low_keyed = turn_back(
            key + s * k_s + b * k_b, k_head, keys, x, x_group, x_head, k_gain,
            target + ratio * size, width,
            groups, 1, size, epsilon, cos, low_cos, sin, low_sin, keyed, low_keyed,
            NORMED, WIDE, HEADS, HALF,
        )  # fmt: skip
        for first in range(0, groups, HEADS):
            group = first + tl.arange(0, HEADS)[:, None]
            inside = (group < groups) & (i < half)
            source = value + s * v_s + b * v_b + group * v_head + i
            goal = target + group * width + (ratio + 1) * size + i
            tl.store(goal, tl.load(source, mask=inside), mask=inside)
            tl.store(goal + half, tl.load(source + half, mask=inside), mask=inside)
    if NORMED:
        row = tl.program_id(0).to(tl.int64) * size + i
        tl.store(q_sums + row, queried, mask=i < half)
        tl.store(q_sums + row + half, low_queried, mask=i < half)
        tl.store(k_sums + row, keyed, mask=i < half)
        tl.store(k_sums + row + half, low_keyed, mask=i < half)


def gradients(
    query: Tensor, key: Tensor, value: Tensor, turns: Tensor, epsilon: float, *normed: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradient `[s, b, groups, (heads per group + 2) d]` of the QKV projection output.

    Args:
        query: gradient `[s, b, heads, d]` of the rotated queries.
        key, value: gradients `[s, b, groups, d]` of the rotated keys and the values.
        turns: cosines and signed sines `[s, 1 or b, 1, 1, 2 d]` of the rotary angles.
        epsilon: epsilon of the norms.
        normed: empty without norms; otherwise the queries `[s, b, groups, heads per group, d]` and
            keys `[s, b, groups, 1, d]` before normalisation, and the norms' gains `[d]`, whose
            gradients are also returned.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    (s, b, heads, size), groups = query.shape, key.shape[2]
    ratio, tokens = heads // groups, s * b
    out = query.new_empty(s, b, groups, (ratio + 2) * size)
    programs = triton.cdiv(tokens, TOKENS)
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = [torch.empty(programs, size, dtype=wide, device=query.device) for _ in normed[2:]]
    turns = turns.contiguous()
    turn_strides = turns.stride(0), turns.stride(1) if turns.shape[1] > 1 else 0
    strides = normed[0].stride()[:4] if normed else (0, 0, 0, 0)
    inputs, written = normed or (None,) * 4, sums or (None,) * 2
    if out.numel():
        heads_kernel[(programs,)](
            query, key, value, turns, *inputs, out, *written,
            tokens, b, groups, ratio, size, epsilon,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *strides, *turn_strides,
            NORMED=bool(normed),
            WIDE=tl.float64 if wide == torch.float64 else tl.float32,
            TOKENS=TOKENS,
            HEADS=HEADS,
            HALF=triton.next_power_of_2(size // 2),
            num_warps=WARPS,
        )  # fmt: skip
    return out, *(x.sum(0).to(gain.dtype) for x, gain in zip(sums, normed[2:], strict=True))
