"""Builder for the dense families: pre-norm decoders with RMSNorm, rotary position embeddings,
grouped-query attention with optional query-key norms, and a feed-forward block.

`transformer_config` returns Megatron's config for a model, `build` creates the Megatron model, and
`parameter_names` maps its parameters to the names declared in models/decoder_units.py. Every
builder module defines these three functions.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from models.blocks.activation import ACTIVATIONS
from models.blocks.attention import FlashCoreAttention, SDPACoreAttention
from models.blocks.decoder_model import DecoderModel, ScaledEmbedding
from models.blocks.latent_attention import LatentAttention
from models.blocks.norm import NormedRowParallelLinear, RMSNorm
from models.blocks.rotary import RotaryEmbedding
from models.blocks.self_attention import BiasedRowParallelLinear, RotatedSelfAttention
from models.blocks.softcapped_attention import SoftcappedCoreAttention
from models.config import ModelConfig
from models.families import FAMILIES
from models.layout import ChunkSpec, Layout

MEGATRON_NAMES = {
    "embedding.word_embeddings.weight": "embedding",
    "decoder.final_layernorm.weight": "final_norm",
    "output_layer.weight": "head",
}
MEGATRON_LAYER_NAMES = {
    "input_layernorm.weight": "attention_norm",
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm",  # Transformer Engine
    "self_attention.linear_qkv.weight": "attention.qkv",
    "self_attention.linear_qkv.bias": "attention.qkv_bias",
    "self_attention.q_layernorm.weight": "attention.q_norm",
    "self_attention.k_layernorm.weight": "attention.k_norm",
    "self_attention.q.weight": "attention.q",
    "self_attention.q_a.weight": "attention.q_a",
    "self_attention.q_a_norm.weight": "attention.q_a_norm",
    "self_attention.q_b.weight": "attention.q_b",
    "self_attention.kv_a.weight": "attention.kv_a",
    "self_attention.kv_a_norm.weight": "attention.kv_a_norm",
    "self_attention.kv_b.weight": "attention.kv_b",
    "self_attention.linear_proj.weight": "attention.o",
    "self_attention.linear_proj.bias": "attention.o_bias",
    "pre_mlp_layernorm.weight": "mlp_norm",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm",  # Transformer Engine
    "self_attention.linear_proj.post_norm.weight": "post_attention_norm",
    "mlp.linear_fc2.weight": "mlp.down",
    "mlp.linear_fc2.post_norm.weight": "post_mlp_norm",
}
WHOLE = Layout()
Recompute = Literal["none", "selective", "full"]
Fp8 = Literal["hybrid", "e4m3"]
RECOMPUTATION: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp", "shared_experts"],
    },
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    layout: Layout = WHOLE,
    recompute: Recompute = "none",
    fp8: Fp8 | None = None,
) -> TransformerConfig:
    """Return Megatron's config for `model`. Weight initialisation and the fused operations of Apex
    and Transformer Engine are disabled."""
    scalar, virtual = model.query_pre_attn_scalar, layout.virtual_pipeline
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=FAMILIES[model.family].zero_centered_gains,
        softmax_scale=None if scalar is None else scalar**-0.5,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=model.gated,
        activation_func=ACTIVATIONS[model.activation].function,
        add_bias_linear=False,
        add_qkv_bias=model.attention_bias != "none",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        # With two stages, activations and gradients go to the same rank, and batched sends in the
        # interleaved schedule would mix them up. Separate, overlapped sends avoid this.
        batch_p2p_comm=virtual == 1,
        # True would synchronize the device after each send, to work around an NCCL bug that has
        # since been fixed.
        batch_p2p_sync=False,
        overlap_p2p_comm=virtual > 1,
        deallocate_pipeline_outputs=False,
        fp8=fp8,
        **RECOMPUTATION[recompute],
    )


def layer_spec(model: ModelConfig, layer: int, mlp: ModuleSpec | None = None) -> ModuleSpec:
    """Return the spec of layer `layer`, which uses Megatron's linear layers and the RMSNorm and
    core attention from models/blocks. `mlp` replaces the dense feed-forward block."""
    row_linear: type[RowParallelLinear] = RowParallelLinear
    if FAMILIES[model.family].post_norms:
        row_linear = NormedRowParallelLinear
    if model.latent is not None:
        attention = ModuleSpec(module=LatentAttention, params={"latent": model.latent})
    else:
        head_norm = RMSNorm if model.qk_norm else IdentityOp
        biased = model.attention_bias == "all"
        attention = ModuleSpec(
            module=RotatedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=core_attention(model, layer),
                linear_proj=BiasedRowParallelLinear if biased else row_linear,
                q_layernorm=head_norm,
                k_layernorm=head_norm,
            ),
        )
    if mlp is None:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=row_linear)
        mlp = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def core_attention(model: ModelConfig, layer: int) -> Any:
    """Return the constructor of layer `layer`'s core attention."""
    if model.explicit_scores:
        softcap, window = model.attention_softcap, model.window(layer)
        return partial(SoftcappedCoreAttention, softcap=softcap, window=window)
    if model.attention_kernel != "auto":
        return partial(FlashCoreAttention, kernel=model.attention_kernel)
    return SDPACoreAttention


def build(
    model: ModelConfig, config: TransformerConfig, chunk: ChunkSpec, **options: Any
) -> GPTModel:
    """Build the Megatron model for a chunk. `options` are passed to `assemble`."""
    if model.attention_backend == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    else:
        layers = [layer_spec(model, layer) for layer in chunk.layers]
        spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
    return assemble(model, config, spec, chunk, **options)


def assemble(
    model: ModelConfig,
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    chunk: ChunkSpec,
    *,
    sequence_length: int,
    virtual_stage: int | None = None,
    **loss: Any,
) -> GPTModel:
    """Build the Megatron model for a chunk from the layers in `spec`, with uninitialised weights.

    Args:
        sequence_length: maximum sequence length, in tokens.
        virtual_stage: index of the chunk on its rank, or None without virtual pipeline stages.
        **loss: loss options of `DecoderModel`.
    """
    built = DecoderModel(
        config,
        spec,
        vocab_size=model.padded_vocab,
        max_sequence_length=sequence_length,
        pre_process=chunk.embedding,
        post_process=chunk.head,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        vp_stage=virtual_stage,
        softcap=model.final_softcap,
        **loss,
    )
    if chunk.embedding and FAMILIES[model.family].scaled_embedding:
        built.embedding = ScaledEmbedding(
            config,
            model.padded_vocab,
            sequence_length,
            position_embedding_type="rope",
            tp_group=built.pg_collection.tp,
        )
        built.setup_embeddings_and_output_layer()
    if model.attention_backend != "sdpa":  # Transformer Engine uses Megatron's rotary embedding
        return built
    built.rotary_pos_emb = RotaryEmbedding(
        kv_channels=model.rotary_size,
        rotary_percent=1.0,
        rotary_base=model.rope_base,
        scaling=model.rope_scaling,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=built.pg_collection.cp,
    )
    return built


def parameter_names(
    chunk: GPTModel, layers: Sequence[int], in_layer: Mapping[str, str] = MEGATRON_LAYER_NAMES
) -> dict[str, str]:
    """Return a dict that maps Megatron's parameter names in a chunk to the declared names.

    `layers` are the global indices of the chunk's layers, and `in_layer` maps names within a layer.
    Raises ValueError for a parameter that has no declared name.
    """
    up = "mlp.gate_up" if chunk.config.gated_linear_unit else "mlp.up"
    in_layer = {**in_layer, "mlp.linear_fc1.weight": up}
    names = dict(MEGATRON_NAMES)
    for name, _ in chunk.named_parameters():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match and match[2] in in_layer:
            names[name] = f"layers.{layers[int(match[1])]}.{in_layer[match[2]]}"
        elif name not in names:
            raise ValueError(f"the model family has no parameter {name}")
    return names
