"""The family deepseek against transformers' DeepseekV3ForCausalLM, on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from models.config import LatentConfig, ModelConfig, MoEConfig
from tests.parity.comparison import compare

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
MODELS = {
    "query latent": DEEPSEEK,
    "direct queries": replace(DEEPSEEK, latent=replace(LATENT, query_rank=None)),
    "groups of experts": replace(
        DEEPSEEK, moe=replace(DEEPSEEK.moe, expert_groups=3, top_groups=2)
    ),
    "one expert each": replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, top_k=1, routed_scale=None)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, world: object, tmp_path: Path
) -> None:
    compare(MODELS[name], tmp_path)
