"""The family deepseek against transformers' DeepseekV3ForCausalLM, on the same weights."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from models.config import LatentConfig, ModelConfig, MoEConfig
from models.initialize import normal
from models.load_balance import routers
from models.units import Unit
from tests.parity.comparison import Place, compare

LATENT = LatentConfig(
    query_rank=24, kv_rank=20, nope_head_dim=12, rope_head_dim=6, value_head_dim=10
)
DEEPSEEK = ModelConfig(
    family="deepseek",
    layers=3,
    hidden=48,
    heads=4,
    ffn=80,
    vocab_size=128,
    rope_base=500.0,
    norm_epsilon=1e-6,
    latent=LATENT,
    moe=MoEConfig(
        experts=12, top_k=4, expert_ffn=16, shared_experts=2, dense_layers=1, routed_scale=2.5
    ),
)
MODELS = {
    "query latent": DEEPSEEK,
    "direct queries": replace(DEEPSEEK, latent=replace(LATENT, query_rank=None)),
    "groups of experts": replace(
        DEEPSEEK, moe=replace(DEEPSEEK.moe, expert_groups=3, top_groups=2)
    ),
}

WHOLE = {
    "q_a": "self_attn.q_a_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}
GAINS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
}
OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def place_in_reference(unit: Unit) -> Place:
    """The reference's parameter that holds `unit`, and its part there."""
    if unit.name in OUTSIDE:
        return f"{OUTSIDE[unit.name]}.weight", ...
    _, layer, rest = unit.name.split(".", 2)
    block = f"model.layers.{layer}."
    if unit.role == "gain":
        return f"{block}{GAINS[rest]}.weight", ...
    if unit.role in WHOLE:
        return f"{block}{WHOLE[unit.role]}.weight", ...
    index = int(rest.split(".")[1])
    rows = unit.shape[0]
    match unit.role:
        case "q" | "q_b":
            name = "q_proj" if unit.role == "q" else "q_b_proj"
            return f"{block}self_attn.{name}.weight", slice(index * rows, (index + 1) * rows)
        case "k_b":
            start = index * (LATENT.nope_head_dim + LATENT.value_head_dim)
            return f"{block}self_attn.kv_b_proj.weight", slice(start, start + rows)
        case "v_b":
            stop = (index + 1) * (LATENT.nope_head_dim + LATENT.value_head_dim)
            return f"{block}self_attn.kv_b_proj.weight", slice(stop - rows, stop)
        case "expert_down":
            return f"{block}mlp.experts.down_proj", index
        case "expert_gate":
            return f"{block}mlp.experts.gate_up_proj", (index, slice(0, rows))
        case _:
            assert unit.role == "expert_up"
            return f"{block}mlp.experts.gate_up_proj", (index, slice(rows, 2 * rows))


def reference(model: ModelConfig) -> DeepseekV3ForCausalLM:
    """The transformers model of the same shape, float32, with a bias on the experts' scores."""
    latent, moe = model.latent, model.moe
    assert latent is not None and moe is not None
    theirs = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden,
            intermediate_size=model.ffn,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.heads,
            q_lora_rank=latent.query_rank,
            kv_lora_rank=latent.kv_rank,
            qk_nope_head_dim=latent.nope_head_dim,
            qk_rope_head_dim=latent.rope_head_dim,
            v_head_dim=latent.value_head_dim,
            n_routed_experts=moe.experts,
            n_shared_experts=moe.shared_experts,
            num_experts_per_tok=moe.top_k,
            moe_intermediate_size=moe.expert_ffn,
            first_k_dense_replace=moe.dense_layers,
            n_group=moe.expert_groups,
            topk_group=moe.top_groups,
            norm_topk_prob=True,
            routed_scaling_factor=moe.routed_scale,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_base},
            rope_interleave=True,
            num_nextn_predict_layers=0,
            tie_word_embeddings=False,
        )
    )
    for layer in range(moe.dense_layers, model.layers):
        theirs.model.layers[layer].mlp.gate.e_score_correction_bias.copy_(bias(layer, moe.experts))
    return theirs


def bias(layer: int, experts: int) -> torch.Tensor:
    """A bias on the experts' scores that changes which are chosen."""
    return 0.2 * normal(f"bias {layer}", (1, experts), 0)[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name: str, world: object) -> None:
    model = MODELS[name]
    moe = model.moe
    assert moe is not None

    def prepare(ours: torch.nn.Module) -> None:
        found = routers([ours])
        assert len(found) == model.layers - moe.dense_layers
        for layer, router in enumerate(found, moe.dense_layers):
            assert router.expert_bias is not None
            router.expert_bias.copy_(bias(layer, moe.experts))

    compare(model, reference(model), place_in_reference, prepare)
