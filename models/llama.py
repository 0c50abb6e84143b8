"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

`units` declares its atomic modules, `build` makes the Megatron model that holds them, and
`parameter_names` says which tensor of that model is which declared parameter.
"""

import re
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from models.blocks import transformer_engine
from models.blocks.attention import SDPACoreAttention
from models.blocks.norm import RMSNorm
from models.config import ModelConfig
from models.units import (
    QKVUnits,
    Unit,
    attention_units,
    gain_unit,
    gated_mlp_units,
    vocabulary_unit,
)

MEGATRON_NAMES = {
    "embedding.word_embeddings.weight": "embedding",
    "decoder.final_layernorm.weight": "final_norm",
    "output_layer.weight": "head",
}
MEGATRON_LAYER_NAMES = {
    "input_layernorm.weight": "attention_norm",
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm",  # Transformer Engine
    "self_attention.linear_qkv.weight": "attention.qkv",
    "self_attention.linear_proj.weight": "attention.o",
    "pre_mlp_layernorm.weight": "mlp_norm",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm",  # Transformer Engine
    "mlp.linear_fc1.weight": "mlp.gate_up",
    "mlp.linear_fc2.weight": "mlp.down",
}


def units(
    model: ModelConfig,
    *,
    layers: Iterable[int],
    embedding: bool = True,
    head: bool = True,
    qkv_units: QKVUnits = "head",
    split_gate_up: bool = True,
    tensor_rank: int = 0,
    tensor_size: int = 1,
) -> list[Unit]:
    """The units of global layers `layers` on one tensor-parallel rank, in forward order."""
    found: list[Unit] = []
    if embedding:
        found.append(
            vocabulary_unit(
                "embedding", rows=model.padded_vocab, hidden=model.hidden, tensor_size=tensor_size
            )
        )
    for layer in layers:
        found.append(gain_unit(f"layers.{layer}.attention_norm", model.hidden))
        found += attention_units(
            layer,
            hidden=model.hidden,
            heads=model.heads,
            query_groups=model.query_groups,
            head_size=model.head_size,
            granularity=qkv_units,
            tensor_rank=tensor_rank,
            tensor_size=tensor_size,
        )
        found.append(gain_unit(f"layers.{layer}.mlp_norm", model.hidden))
        found += gated_mlp_units(
            layer,
            hidden=model.hidden,
            ffn=model.ffn,
            split_gate_up=split_gate_up,
            tensor_size=tensor_size,
        )
    if head:
        found.append(gain_unit("final_norm", model.hidden))
        found.append(
            vocabulary_unit(
                "head", rows=model.padded_vocab, hidden=model.hidden, tensor_size=tensor_size
            )
        )
    return found


def transformer_config(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    virtual_size: int = 1,
    sequence_parallel: bool = False,
) -> TransformerConfig:
    """Megatron's config of this model. Every fusion that needs Apex or Transformer Engine is off;
    Megatron draws no weights (`initialize` does, layout-independently)."""
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=virtual_size if virtual_size > 1 else None,
        sequence_parallel=sequence_parallel,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        # Batched sends between the same two ranks swap activations and gradients when the
        # interleaved schedule runs on two stages, so it uses separate, overlapped ones.
        batch_p2p_comm=virtual_size == 1,
        overlap_p2p_comm=virtual_size > 1,
        deallocate_pipeline_outputs=False,
    )


def layer_spec() -> ModuleSpec:
    """The layer of Megatron's own linears around our RMSNorm and SDPA core attention."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SDPACoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(model: ModelConfig, layers: int) -> ModuleSpec | TransformerBlockSubmodules:
    """Spec of a pipeline stage of `layers` layers on the backend the config asks for."""
    if model.attention_backend == "transformer_engine":
        return transformer_engine.layer_spec()
    return TransformerBlockSubmodules(layer_specs=[layer_spec()] * layers, layer_norm=RMSNorm)


def build(
    model: ModelConfig,
    config: TransformerConfig,
    *,
    layers: Sequence[int],
    embedding: bool,
    head: bool,
    sequence_length: int,
    virtual_stage: int | None = None,
) -> GPTModel:
    """The Megatron model chunk that holds global layers `layers`, weights not yet initialised."""
    return GPTModel(
        config,
        block_spec(model, len(layers)),
        vocab_size=model.padded_vocab,
        max_sequence_length=sequence_length,
        pre_process=embedding,
        post_process=head,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        vp_stage=virtual_stage,
    )


def parameter_names(chunk: torch.nn.Module, layers: Sequence[int]) -> dict[str, str]:
    """Global name of each parameter of a chunk: `{megatron name: declared name}`.

    Raises ValueError for a parameter that the family does not know.
    """
    names = {}
    for name, _ in chunk.named_parameters():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if name in MEGATRON_NAMES:
            names[name] = MEGATRON_NAMES[name]
        elif match and match[2] in MEGATRON_LAYER_NAMES:
            names[name] = f"layers.{layers[int(match[1])]}.{MEGATRON_LAYER_NAMES[match[2]]}"
        else:
            raise ValueError(f"parameter {name} is not one of the llama family's")
    return names
