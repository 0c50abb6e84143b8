"""What the dense families share: a pre-norm decoder with RMSNorm, rotary positions, grouped-query
attention with or without query-key norms, and a feed-forward block with or without a gate.

`units` declares its atomic modules, `build` makes the Megatron model that holds them, and
`parameter_names` says which tensor of that model is which declared parameter.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
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
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from models.blocks import transformer_engine
from models.blocks.activation import squared_relu
from models.blocks.attention import RotatedSelfAttention, SDPACoreAttention
from models.blocks.chunked_loss import ChunkedLossModel
from models.blocks.in_graph_pc import GAMMA, plain_name
from models.blocks.latent_attention import LatentAttention, LatentSubmodules
from models.blocks.norm import RMSNorm
from models.blocks.rotary import RotaryEmbedding
from models.config import LatentConfig, ModelConfig
from models.latent import latent_attention_units
from models.units import (
    QKVUnits,
    Unit,
    attention_units,
    gain_unit,
    gated_mlp_units,
    mlp_units,
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
    "pre_mlp_layernorm.weight": "mlp_norm",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm",  # Transformer Engine
    "mlp.linear_fc1.weight": "mlp.gate_up",
    "mlp.linear_fc2.weight": "mlp.down",
}
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
ACTIVATIONS = {"swiglu": F.silu, "relu2": squared_relu}


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
    return decoder_units(
        model,
        lambda layer: feed_forward_units(
            model, layer, split_gate_up=split_gate_up, tensor_size=tensor_size
        ),
        layers=layers,
        embedding=embedding,
        head=head,
        qkv_units=qkv_units,
        tensor_rank=tensor_rank,
        tensor_size=tensor_size,
    )


def decoder_units(
    model: ModelConfig,
    feed_forward: Callable[[int], list[Unit]],
    *,
    layers: Iterable[int],
    embedding: bool,
    head: bool,
    qkv_units: QKVUnits,
    tensor_rank: int,
    tensor_size: int,
) -> list[Unit]:
    """The units of a decoder whose layers have the units `feed_forward(layer)` after attention."""
    found: list[Unit] = []
    if embedding:
        found.append(
            vocabulary_unit(
                "embedding", rows=model.padded_vocab, hidden=model.hidden, tensor_size=tensor_size
            )
        )
    for layer in layers:
        found.append(gain_unit(f"layers.{layer}.attention_norm", model.hidden))
        place = {"tensor_rank": tensor_rank, "tensor_size": tensor_size}
        found += self_attention_units(model, layer, granularity=qkv_units, **place)
        found.append(gain_unit(f"layers.{layer}.mlp_norm", model.hidden))
        found += feed_forward(layer)
    if head:
        found.append(gain_unit("final_norm", model.hidden))
        found.append(
            vocabulary_unit(
                "head", rows=model.padded_vocab, hidden=model.hidden, tensor_size=tensor_size
            )
        )
    return found


def self_attention_units(
    model: ModelConfig, layer: int, *, granularity: QKVUnits, tensor_rank: int, tensor_size: int
) -> list[Unit]:
    """The units of layer `layer`'s attention, with or without latents."""
    if model.latent is not None:
        return latent_attention_units(
            layer,
            model.latent,
            hidden=model.hidden,
            heads=model.heads,
            granularity=granularity,
            tensor_rank=tensor_rank,
            tensor_size=tensor_size,
        )
    return attention_units(
        layer,
        hidden=model.hidden,
        heads=model.heads,
        query_groups=model.query_groups,
        head_size=model.head_size,
        granularity=granularity,
        tensor_rank=tensor_rank,
        tensor_size=tensor_size,
        qk_norm=model.qk_norm,
    )


def feed_forward_units(
    model: ModelConfig, layer: int, *, split_gate_up: bool, tensor_size: int
) -> list[Unit]:
    """The units of layer `layer`'s feed-forward block, with or without a gate."""
    if not model.gated:
        return mlp_units(layer, hidden=model.hidden, ffn=model.ffn, tensor_size=tensor_size)
    return gated_mlp_units(
        layer,
        hidden=model.hidden,
        ffn=model.ffn,
        split_gate_up=split_gate_up,
        tensor_size=tensor_size,
    )


def transformer_config(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    virtual_size: int = 1,
    context_size: int = 1,
    sequence_parallel: bool = False,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    recompute: Recompute = "none",
    fp8: Fp8 | None = None,
) -> TransformerConfig:
    """Megatron's config of this model: it draws no weights, and fusions of Apex or TE are off."""
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=model.gated,
        activation_func=ACTIVATIONS[model.activation],
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
        num_layers_in_first_pipeline_stage=first_stage_layers,
        num_layers_in_last_pipeline_stage=last_stage_layers,
        context_parallel_size=context_size,
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
        # A device-wide wait after each send, against a fault of NCCL that is long mended.
        batch_p2p_sync=False,
        overlap_p2p_comm=virtual_size > 1,
        deallocate_pipeline_outputs=False,
        fp8=fp8,
        **RECOMPUTATION[recompute],
    )


def layer_spec(model: ModelConfig) -> ModuleSpec:
    """The layer of Megatron's own linears around our RMSNorm and SDPA core attention."""
    latent = model.latent
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention_spec(model) if latent is None else latent_spec(latent),
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


def attention_spec(model: ModelConfig) -> ModuleSpec:
    """Megatron's grouped-query attention, with or without query-key norms."""
    head_norm = RMSNorm if model.qk_norm else IdentityOp
    return ModuleSpec(
        module=RotatedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SDPACoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def latent_spec(latent: LatentConfig) -> ModuleSpec:
    """Multi-head latent attention on the same linears, norm and core attention."""
    return ModuleSpec(
        module=LatentAttention,
        params={"latent": latent},
        submodules=LatentSubmodules(
            column_linear=ColumnParallelLinear,
            row_linear=RowParallelLinear,
            norm=RMSNorm,
            core_attention=SDPACoreAttention,
        ),
    )


def block_spec(model: ModelConfig, layers: int) -> ModuleSpec | TransformerBlockSubmodules:
    """Spec of a pipeline stage of `layers` layers on the backend the config asks for."""
    if model.attention_backend == "transformer_engine":
        return transformer_engine.layer_spec(model.qk_norm)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(model)] * layers, layer_norm=RMSNorm)


def build(
    model: ModelConfig,
    config: TransformerConfig,
    *,
    layers: Sequence[int],
    embedding: bool,
    head: bool,
    sequence_length: int,
    virtual_stage: int | None = None,
    loss_chunk: int | None = None,
) -> GPTModel:
    """The Megatron model chunk of global layers `layers`, weights not yet initialised."""
    return assemble(
        model,
        config,
        block_spec(model, len(layers)),
        embedding=embedding,
        head=head,
        sequence_length=sequence_length,
        virtual_stage=virtual_stage,
        loss_chunk=loss_chunk,
    )


def assemble(
    model: ModelConfig,
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    *,
    embedding: bool,
    head: bool,
    sequence_length: int,
    virtual_stage: int | None,
    loss_chunk: int | None,
) -> GPTModel:
    """The Megatron model chunk whose layers are those of `spec`, with our rotary embedding."""
    chunk = ChunkedLossModel(
        config,
        spec,
        vocab_size=model.padded_vocab,
        max_sequence_length=sequence_length,
        pre_process=embedding,
        post_process=head,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        vp_stage=virtual_stage,
        loss_chunk=loss_chunk,
    )
    chunk.rotary_pos_emb = RotaryEmbedding(
        kv_channels=model.rotary_size,
        rotary_percent=1.0,
        rotary_base=model.rope_base,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=chunk.pg_collection.cp,
    )
    return chunk


def parameter_names(chunk: GPTModel, layers: Sequence[int]) -> dict[str, str]:
    """Global name of each parameter of a chunk: `{megatron name: declared name}`.

    Raises ValueError for a parameter that the dense families do not know.
    """
    of_layer = dict(MEGATRON_LAYER_NAMES)
    if not chunk.config.gated_linear_unit:
        of_layer["mlp.linear_fc1.weight"] = "mlp.up"
    return {
        name: declared_name(name, layers, lambda _, inner: of_layer.get(inner))
        for name, _ in chunk.named_parameters()
    }


def declared_name(
    name: str, layers: Sequence[int], in_layer: Callable[[int, str], str | None]
) -> str:
    """The declared name of one parameter of a chunk that holds global layers `layers`.

    `in_layer(index in the chunk, name in the layer)` is its declared name in the layer, or None.
    Raises ValueError if it has none.
    """
    name = plain_name(name)
    if name.endswith(GAMMA):
        return declared_name(name.removesuffix(GAMMA), layers, in_layer) + GAMMA
    if name in MEGATRON_NAMES:
        return MEGATRON_NAMES[name]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    found = in_layer(int(match[1]), match[2]) if match else None
    if match is None or found is None:
        raise ValueError(f"parameter {name} is not one that the model family declares")
    return f"layers.{layers[int(match[1])]}.{found}"
