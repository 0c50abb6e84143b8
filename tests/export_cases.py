"""Config overrides of tiny models whose checkpoints are exported, with `__` for the dot."""

from typing import Any

QWEN3 = {"model__family": "qwen3", "model__qk_norm": True, "model__head_dim": 24}
GEMMA2: dict[str, Any] = {
    "model__family": "gemma2",
    "model__activation": "geglu",
    "model__head_dim": 24,
    "model__query_pre_attn_scalar": 20,
    "model__attention_softcap": 2.0,
    "model__final_softcap": 3.0,
    "model__sliding_window": 9,
}
LATENT = {"kv_rank": 24, "nope_head_dim": 12, "rope_head_dim": 8, "value_head_dim": 10}
MIXTURE: dict[str, Any] = {
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
}
DEEPSEEK: dict[str, Any] = {
    "model__family": "deepseek",
    "model__kv_heads": "null",
    "model__norm_epsilon": 1e-6,
    **{f"model__latent__{key}": value for key, value in LATENT.items()},
    **MIXTURE,
    "model__moe__shared_experts": 1,
}
MOE: dict[str, Any] = {
    "model__family": "moe",
    "model__head_dim": 24,
    **MIXTURE,
    "model__moe__shared_experts": 2,
}
"""Sigmoid scores: GLM-4.5's class."""
SOFTMAX_MOE: dict[str, Any] = {
    "model__family": "moe",
    "model__qk_norm": True,
    **MIXTURE,
    "model__moe__score": "softmax",
    "model__moe__expert_bias": False,
    "model__moe__routed_scale": 1.0,
}
"""Qwen3-MoE's class."""
