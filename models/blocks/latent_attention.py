"""Multi-head latent attention on Megatron's linear layers, with tensor and context parallelism."""

from collections.abc import Callable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.blocks.attention import Documents, SDPACoreAttention
from models.blocks.norm import RMSNorm
from models.blocks.rotary import rotate_pairs
from models.config import LatentConfig


class ReplicatedLinear(torch.nn.Linear):
    """`x W^T` for a rank's part of the sequence, with W replicated across tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        device = None if config.use_cpu_initialization else torch.device("cuda")
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype, device=device)


class LatentAttention(torch.nn.Module):
    """Causal attention with keys and values projected from a per-token latent (DeepSeek-V2, 2.1).

        q = q_b(norm(q_a(x)))  or  q(x)         [..., heads, nope + rope]
        c, k_rope = kv_a(x)                     [..., kv_rank], [..., rope], shared by all heads
        k_nope, v = kv_b(norm(c))               [..., heads, nope], [..., heads, value]

    Rotary pairs are interleaved, as in DeepSeek's weights. Without Transformer Engine, Megatron's
    own module shards q_a and kv_a over tensor-parallel ranks and drops the contributions of other
    ranks to the gradient of k_rope.
    """

    def __init__(
        self,
        config: TransformerConfig,
        latent: LatentConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.config = config
        self.latent = latent
        self.rotate: Callable[[Tensor, Tensor], Tensor] = rotate_pairs
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.tensor = getattr(pg_collection, "tp", None)
        options = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        out_of = options | {"init_method": config.init_method, "gather_output": False}
        rank, query_width = latent.query_rank, heads * config.kv_channels
        if rank is None:
            self.q = ColumnParallelLinear(hidden, query_width, **out_of)
        else:
            self.q_a = ReplicatedLinear(config, hidden, rank)
            self.q_a_norm = RMSNorm(config, rank, config.layernorm_epsilon)
            self.q_b = ColumnParallelLinear(rank, query_width, **out_of)
        self.kv_a = ReplicatedLinear(config, hidden, latent.kv_rank + latent.rope_head_dim)
        self.kv_a_norm = RMSNorm(config, latent.kv_rank, config.layernorm_epsilon)
        kv_width = heads * (latent.nope_head_dim + latent.value_head_dim)
        self.kv_b = ColumnParallelLinear(latent.kv_rank, kv_width, **out_of)
        self.core_attention = SDPACoreAttention(config, pg_collection=pg_collection)
        self.linear_proj = RowParallelLinear(
            heads * latent.value_head_dim,
            hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **(options | {"skip_bias_add": True}),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor,
        packed_seq_params: Documents | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output `[s, b, hidden]` for `hidden_states` `[s, b, hidden]`, and None as the
        bias.

        `rotary_pos_emb` `[s, 1 or b, 1, 2 rope_head_dim]` is the output of `RotaryEmbedding`. Under
        sequence parallelism, input and output hold this rank's part of the sequence.
        """
        query, key, value = self.heads(hidden_states, rotary_pos_emb)
        attended = self.core_attention(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params
        )
        output, bias = self.linear_proj(attended)
        return output, bias

    def heads(self, hidden_states: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of this rank's heads for the whole sequence.

        Queries and keys are `[s, b, heads, nope + rope]`, and values are `[s, b, heads, value]`.
        """
        latent = self.latent
        nope, rope = latent.nope_head_dim, latent.rope_head_dim
        if latent.query_rank is None:
            query = self.q(hidden_states)[0]
        else:
            query = self.q_b(self.q_a_norm(self.q_a(hidden_states)))[0]
        query = query.unflatten(-1, (-1, nope + rope))
        compressed, key_rope = self.kv_a(hidden_states).split([latent.kv_rank, rope], -1)
        both = self.kv_b(self.kv_a_norm(compressed))[0]
        key, value = both.unflatten(-1, (-1, nope + latent.value_head_dim)).split(
            [nope, latent.value_head_dim], -1
        )
        query_nope, query_rope = query.split([nope, rope], -1)
        query = torch.cat([query_nope, self.rotate(query_rope, turns)], -1)
        # All heads share the rotary keys: the backward pass sums the keys' gradient over the heads.
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(key_rope, group=self.tensor)
        else:
            shared = copy_to_tensor_model_parallel_region(key_rope, group=self.tensor)
        shared = self.rotate(shared.unsqueeze(-2), turns)
        key = torch.cat([key, shared.expand(*key.shape[:-1], rope)], -1)
        return query, key, value
