"""Config overrides for tiny models to export, with `__` in place of dots."""

from typing import Any

from tests.tiny_families import overrides, settings

QWEN3 = {**overrides(settings("qwen3")), "model__head_dim": 24}
GEMMA2: dict[str, Any] = {**overrides(settings("gemma2")), "model__head_dim": 24}
DEEPSEEK: dict[str, Any] = {**overrides(settings("deepseek")), "model__latent__query_rank": "null"}
MOE: dict[str, Any] = {
    **overrides(settings("moe")),
    "model__qk_norm": False,
    "model__head_dim": 24,
    "model__moe__shared_experts": 2,
}
"""Sigmoid scores, exported as GLM-4.5."""
SOFTMAX_MOE: dict[str, Any] = {
    **overrides(settings("moe")),
    "model__moe__shared_experts": 0,
    "model__moe__score": "softmax",
    "model__moe__expert_bias": False,
    "model__moe__routed_scale": 1.0,
}
"""Softmax scores, exported as Qwen3-MoE."""
