"""Self-attention built on core attention, with a fused linear layer for queries, keys and values.

Autograd would write three gradients and then copy them into one tensor for the linear layer's
backward pass. Here a single function writes all three gradients directly to one tensor. This
function can be compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from models.blocks.norm import RMSNorm, rms_norm, rms_norm_gradients
from models.blocks.rotary import rotate_halves, rotated


def turned_heads(
    query: Tensor, key: Tensor, turns: Tensor, epsilon: float, *gains: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys with `gains`, if any, and apply rotary positions to both.

    `query` `[s, b, groups, heads per group, d]` becomes `[s, b, heads, d]`. `key` `[s, b, groups,
    1, d]` becomes `[s, b, groups, d]`. `turns` is `[s, 1 or b, 1, 1, 2 d]`.
    """
    if gains:
        query, key = rms_norm(query, gains[0], epsilon), rms_norm(key, gains[1], epsilon)
    query, key = rotate_halves(query, key, turns)
    return query.flatten(2, 3), key.flatten(2, 3)


def heads_gradients(
    query: Tensor, key: Tensor, value: Tensor, turns: Tensor, epsilon: float, *normed: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradient `[s, b, groups, (heads per group + 2) d]` of the linear layer's output,
    followed by the gradients of the gains, if any.

    `query` `[s, b, heads, d]`, `key` and `value` `[s, b, groups, d]` are the gradients of the
    queries, keys and values. `normed` holds the inputs to `turned_heads` (queries, keys and the two
    gains), or is empty if there are no gains.
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
    """The functions `turned_heads` and `heads_gradients`, which may be compiled.
    spectral/kernels/heads.py provides a kernel for `heads_gradients`."""

    forward: Callable[..., tuple[Tensor, Tensor]] = turned_heads
    backward: Callable[..., tuple[Tensor, ...]] = heads_gradients


def split_heads(
    mixed: Tensor, turns: Tensor, gains: Sequence[Tensor], epsilon: float, functions: HeadFunctions
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `mixed` into queries `[s, b, heads, d]`, and keys and values `[s, b, groups, d]`.

    `mixed` `[s, b, groups, (heads per group + 2) d]` holds the queries, key and value of each
    group. Queries and keys are normalised with `gains`, if any, and rotated by `turns` `[s, 1 or b,
    1, 2 d]`.
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
    """Return queries, keys and values `[s, b, groups, n, size]` as views of `mixed`."""
    heads = mixed.unflatten(3, (-1, size))
    return heads[:, :, :, :-2], heads[:, :, :, -2:-1], heads[:, :, :, -1:]


class RotatedSelfAttention(SelfAttention):
    """Megatron's self-attention, with rotary positions applied by the function `rotate`.

    Megatron launches a dozen operations to rotate queries and another dozen for keys. The compiled
    functions in `heads` also normalise queries and keys, and write the gradients of queries, keys
    and values to one tensor.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rotate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate_halves
        self.heads: HeadFunctions | None = None
        self._turns: Tensor | None = None

    @property
    def splits_heads(self) -> bool:
        """Whether `heads` can be used. Ranks must hold whole groups, and gains must not be
        zero-centered."""
        norms = self.q_layernorm, self.k_layernorm
        plain = not self.config.layernorm_zero_centered_gamma
        whole = self.config.num_query_groups >= self.world_size
        return whole and all(
            isinstance(norm, IdentityOp | None) or (isinstance(norm, RMSNorm) and plain)
            for norm in norms
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return Megatron's output. `rotary_pos_emb` `[s, 1 or b, 1, 2 d]` is the output of
        `RotaryEmbedding`."""
        self._turns = rotary_pos_emb
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, **options
        )
        return output

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> Any:
        """Return Megatron's queries, keys and values, with queries and keys rotated."""
        if self._turns is None or self.heads is None:
            query, key, value = super().get_query_key_value_tensors(*arguments, **options)
            if self._turns is not None:
                query, key = self.rotate(query, key, self._turns)
            return query, key, value
        options["split_qkv"] = False
        mixed, _ = super().get_query_key_value_tensors(*arguments, **options)
        norms = [x for x in (self.q_layernorm, self.k_layernorm) if isinstance(x, RMSNorm)]
        epsilon = self.config.layernorm_epsilon
        return split_heads(mixed, self._turns, [x.weight for x in norms], epsilon, self.heads)


class BiasedRowParallelLinear(RowParallelLinear):
    """Megatron's row-parallel linear layer, with a bias even if the config disables biases."""

    def __init__(self, *arguments: Any, bias: bool, **options: Any) -> None:
        super().__init__(*arguments, bias=True, **options)
