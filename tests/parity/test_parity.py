"""Every family against its model in the transformers library, on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from models.config import LatentConfig, ModelConfig, MoEConfig
from tests.parity.comparison import compare

SHAPE = {"layers": 2, "hidden": 48, "ffn": 80, "vocab_size": 120, "rope_base": 500.0}
LATENT = LatentConfig(
    query_rank=24, kv_rank=20, nope_head_dim=12, rope_head_dim=6, value_head_dim=10
)
DEEPSEEK = ModelConfig(
    family="deepseek",
    layers=3,
    hidden=48,
    heads=4,
    ffn=80,
    vocab_size=120,
    rope_base=500.0,
    norm_epsilon=1e-6,
    latent=LATENT,
    moe=MoEConfig(
        experts=12, top_k=4, expert_ffn=16, shared_experts=2, dense_layers=1, routed_scale=2.5
    ),
)
GEMMA2 = ModelConfig(
    family="gemma2",
    layers=3,
    hidden=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=80,
    activation="geglu",
    vocab_size=120,
    rope_base=500.0,
    norm_epsilon=1e-6,
    query_pre_attn_scalar=10,
    # Of the size of what they cap, so that they matter.
    attention_softcap=2.0,
    final_softcap=1.5,
    sliding_window=7,
)
MODELS = {
    "llama": ModelConfig(**SHAPE, heads=6, kv_heads=2),
    "mha": ModelConfig(**SHAPE, heads=6),
    "gpt with a gate": ModelConfig(family="gpt", **SHAPE, heads=4),
    "gpt with geglu": ModelConfig(family="gpt", **SHAPE, heads=4, activation="geglu"),
    "qwen3": ModelConfig(
        family="qwen3", **SHAPE, heads=4, kv_heads=2, head_dim=16, qk_norm=True, norm_epsilon=1e-6
    ),
    "deepseek": DEEPSEEK,
    "direct queries": replace(DEEPSEEK, latent=replace(LATENT, query_rank=None)),
    "groups of experts": replace(
        DEEPSEEK, moe=replace(DEEPSEEK.moe, expert_groups=3, top_groups=2)
    ),
    "one expert each": replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, top_k=1, routed_scale=None)),
    "gemma2": GEMMA2,
    "no windows": replace(GEMMA2, sliding_window=None),
    "no caps": replace(GEMMA2, attention_softcap=None, final_softcap=None),
    "no windows and caps": replace(
        GEMMA2, sliding_window=None, attention_softcap=None, query_pre_attn_scalar=None
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, world: object, tmp_path: Path
) -> None:
    compare(MODELS[name], tmp_path)
