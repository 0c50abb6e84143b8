"""Builder for mixture-of-experts models.

After the leading dense layers, each feed-forward block consists of a router, routed experts and
shared experts. Each token uses `top_k` routed experts and all shared experts.

Every expert has its own parameters, whether GEMMs are sequential or grouped. No tokens are dropped.
Attention, embedding and head are the same as in the dense families.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from models import dense
from models.blocks.experts import GroupedExperts, Router, SortedDispatcher
from models.blocks.norm import RMSNorm
from models.config import ModelConfig, scale_of
from models.layout import ChunkSpec, Layout

LAYER_NAMES = {
    **dense.MEGATRON_LAYER_NAMES,
    "mlp.router.weight": "router",
    "mlp.shared_experts.linear_fc1.weight": "shared.gate_up",
    "mlp.shared_experts.linear_fc2.weight": "shared.down",
    "mlp.shared_experts.gate_weight": "shared.router",
}
EXPERT_NAMES = {"linear_fc1": "gate_up", "linear_fc2": "down"}


def transformer_config(
    model: ModelConfig, *, dtype: torch.dtype, layout: Layout = dense.WHOLE, **options: Any
) -> TransformerConfig:
    """Return Megatron's config for `model`. `options` are passed to `dense.transformer_config`."""
    moe = model.moe
    assert moe is not None
    losses = {"seq_aux_loss": moe.sequence_aux_loss, "global_aux_loss": moe.global_aux_loss}
    active = {kind: coefficient for kind, coefficient in losses.items() if coefficient > 0}
    return replace(
        dense.transformer_config(model, dtype=dtype, layout=layout, **options),
        num_moe_experts=moe.experts,
        moe_ffn_hidden_size=moe.expert_ffn,
        moe_shared_expert_intermediate_size=moe.shared_experts * moe.expert_ffn or None,
        moe_shared_expert_gate=moe.shared_gate,
        moe_router_topk=moe.top_k,
        moe_router_score_function=moe.score,
        # Softmax over the top-k logits equals the renormalised softmax over all logits, but over a
        # single logit it would always be 1.
        moe_router_pre_softmax=moe.top_k == 1,
        moe_router_num_groups=moe.expert_groups if moe.expert_groups > 1 else None,
        moe_router_group_topk=moe.top_groups if moe.expert_groups > 1 else None,
        moe_router_topk_scaling_factor=scale_of(moe),
        moe_router_enable_expert_bias=moe.expert_bias,
        moe_router_bias_update_rate=moe.expert_bias_rate,
        moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        moe_router_load_balancing_type=list(active) or "none",
        moe_aux_loss_coeff=list(active.values()) or 0.0,
        moe_z_loss_coeff=moe.z_loss or None,
        moe_token_dispatcher_type="allgather",  # `build` replaces this dispatcher
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def build(
    model: ModelConfig, config: TransformerConfig, chunk: ChunkSpec, **options: Any
) -> GPTModel:
    """Build the Megatron model for a chunk; see `models.dense.build`."""
    assert model.moe is not None
    grouped = model.moe.backend == "grouped"
    if model.moe.backend == "auto":  # PyTorch's kernel for grouped GEMMs is for bfloat16 on GPUs
        grouped = config.bf16 and not config.use_cpu_initialization
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=GroupedExperts if grouped else SequentialMLP, submodules=linears)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    moe = ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(router=Router, experts=experts, shared_experts=shared),
    )
    specs = [
        dense.layer_spec(model, layer, None if model.mixture(layer) is None else moe)
        for layer in chunk.layers
    ]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    built = dense.assemble(model, config, block, chunk, **options)
    for module in built.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher = SortedDispatcher(
                module.num_local_experts,
                module.config,
                get_default_pg_collection(),
                on_host=not grouped,
            )
    return built


def parameter_names(chunk: GPTModel, layers: Sequence[int]) -> dict[str, str]:
    """Return a dict that maps Megatron's parameter names in a chunk to the declared names; see
    `models.dense.parameter_names`. Expert names contain the expert's global index in the layer."""
    layer = next((module for module in chunk.modules() if isinstance(module, MoELayer)), None)
    names = {
        f"mlp.experts.local_experts.{i}.{linear}.weight": f"experts.{index}.{name}"
        for i, index in enumerate([] if layer is None else layer.local_expert_indices)
        for linear, name in EXPERT_NAMES.items()
    }
    return dense.parameter_names(chunk, layers, {**LAYER_NAMES, **names})
