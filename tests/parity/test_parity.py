"""Every family compared with its model in transformers, on the same weights."""

from dataclasses import replace
from typing import Any

import pytest

from models.config import ModelConfig, RopeScalingConfig
from tests.parity.comparison import compare
from tests.slow_cases import slow_but
from tests.tiny_families import MIXTURE, mixture, tiny_model


def tiny(family: str, **changes: Any) -> ModelConfig:
    """Return a tiny model in which positions noticeably rotate every dimension of a head."""
    return tiny_model(family, rope_base=500.0, **changes)


EXPERTS = {"experts": 12, "top_k": 4, "shared_experts": 2, "routed_scale": 2.5}
DEEPSEEK = tiny("deepseek", layers=3, moe={**MIXTURE, **EXPERTS, "sequence_aux_loss": 0.0})
GEMMA2 = tiny("gemma2", layers=3, attention_softcap=2.0, final_softcap=1.5)
LENGTH = {"original_max_position_embeddings": 16}
LLAMA3 = RopeScalingConfig(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **LENGTH
)
YARN = RopeScalingConfig(kind="yarn", factor=4.0, **LENGTH)
MODELS = {
    "llama": tiny("llama"),
    "mha": tiny("llama", kv_heads=None, head_dim=None),
    "gpt with a gate": tiny("gpt", activation="swiglu"),
    "gpt with geglu": tiny("gpt", activation="geglu"),
    "qwen3": tiny("qwen3"),
    "deepseek": DEEPSEEK,
    "direct queries": replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, query_rank=None)),
    "groups of experts": replace(
        DEEPSEEK, moe=replace(DEEPSEEK.moe, expert_groups=3, top_groups=2)
    ),
    "one expert each": replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, top_k=1, routed_scale=None)),
    "gemma2": GEMMA2,
    "qwen2": tiny("llama", head_dim=None, attention_bias="qkv", tie_embeddings=True),
    "all biases": tiny("qwen3", attention_bias="all"),
    "glm4 with biases": replace(mixture(), attention_bias="qkv"),
    "llama3 positions": tiny("llama", rope_scaling=LLAMA3),
    "yarn": tiny("qwen3", rope_scaling=YARN),
    "yarn of gpt-oss": replace(mixture(), rope_scaling=replace(YARN, truncate=False)),
    "linear positions": replace(GEMMA2, rope_scaling=RopeScalingConfig(kind="linear", factor=3.0)),
    "tied": tiny("llama", tie_embeddings=True),
    "tied qwen3": tiny("qwen3", tie_embeddings=True),
    "tied gemma2": replace(GEMMA2, tie_embeddings=True),
    "tied experts": replace(DEEPSEEK, tie_embeddings=True),
    "no windows": replace(GEMMA2, sliding_window=None),
    "no caps": replace(GEMMA2, attention_softcap=None, final_softcap=None),
    "no windows and caps": replace(
        GEMMA2, sliding_window=None, attention_softcap=None, query_pre_attn_scalar=None
    ),
}


SLOW = (
    "tied",
    "tied qwen3",
    "tied experts",
    "glm4 with biases",
    "yarn of gpt-oss",
    "linear positions",
)


@pytest.mark.parametrize("name", slow_but([n for n in MODELS if n not in SLOW], [*MODELS]))
def test_logits_and_gradients_are_those_of_transformers(name, world, tmp_path) -> None:
    compare(MODELS[name], tmp_path)
