"""Impossible settings for mixtures of experts and DeepSeek are rejected, by key and kind."""

import pytest

from tests.small_recipes import recipe
from training.config import InvalidConfigError, check

MIXTURE = [
    (["model.moe=null"], "model.moe must be a section"),
    (["model.family=qwen3"], "model.moe must be null"),
    (["model.moe.top_k=9"], "model.moe.top_k must be at most experts = 8"),
    (["model.moe.top_k=0"], "model.moe.top_k must be at least 1"),
    (["model.moe.dense_layers=4"], "model.moe.dense_layers must be below layers = 4"),
    (["model.moe.score=softmax"], "model.moe.expert_bias must be false"),
    (["model.moe.shared_experts=0", "model.moe.shared_gate=true"], "model.moe.shared_gate must be"),
    (["model.moe.z_loss=-1.0"], "model.moe.z_loss must be at least 0"),
    (["model.moe.routed_scale=0"], "model.moe.routed_scale must be above 0"),
    (["model.moe.expert=8"], "unknown key model.moe.expert; did you mean model.moe.experts?"),
    (["model.attention_backend=transformer_engine"], "model.attention_backend must be sdpa"),
    (["parallel.expert=3"], "model.moe.experts must be divisible by parallel.expert = 3"),
    (["parallel.tensor=2", "parallel.sequence=false"], "parallel.sequence must be true or null"),
    (["model.moe.dense_layers=0", "optimizer.roles.gate.lr=1e-3"], "optimizer.roles must name one"),
]
DEEPSEEK = [
    (["model.latent=null"], "model.latent must be a section"),
    (["model.family=moe"], "model.latent must be null"),
    (["model.latent.kv_rank=0"], "model.latent.kv_rank must be at least 1"),
    (["model.latent.rope_head_dim=5"], "model.latent.rope_head_dim must be a multiple of 2"),
    (["model.kv_heads=2"], "model.kv_heads must be null or heads = 4"),
    (["model.head_dim=32"], "model.head_dim must be null with latent"),
    (["model.norm_epsilon=1e-5"], "model.norm_epsilon must be 1e-06"),
    (["model.moe.score=softmax", "model.moe.expert_bias=false"], "model.moe.score must be sigmoid"),
    (["model.moe.shared_gate=true"], "model.moe.shared_gate must be false"),
    (["model.moe.shared_experts=0"], "model.moe.shared_experts must be at least 1"),
    (["model.moe.expert_groups=8"], "model.moe.experts must be at least twice expert_groups = "),
    (
        ["model.moe.expert_groups=2", "model.moe.top_groups=2"],
        "model.moe.top_k must be at least 4 and less than 6 with top_groups = 2",
    ),
    *(
        (
            ["model.moe.expert_groups=2", f"model.moe.top_k={top_k}"],
            f"model.moe.top_k must be at least 2 and less than 3 with top_groups = 1, got {top_k}",
        )
        for top_k in (1, 3)
    ),
    (["model.moe.expert_groups=3"], "model.moe.expert_groups must divide experts = 8"),
    (["model.moe.expert_groups=2", "model.moe.top_groups=3"], "model.moe.top_groups must be at"),
    (
        ["model.moe.expert_groups=4", "model.moe.top_k=3"],
        "model.moe.top_k must be at most 2, the number of experts in top_groups",
    ),
    (["model.moe.top_groups=2"], "model.moe.top_groups must be at most expert_groups = 1"),
    (["model.attention_bias=qkv"], "model.attention_bias must be none for family deepseek"),
    (["model.rope_scaling={kind: linear, factor: 2.0}"], "model.rope_scaling must be null for"),
    (["model.qk_norm=true"], "model.qk_norm must be false"),
    (["model.activation=relu2"], "model.activation must be swiglu"),
    (["parallel.tensor=3"], "model.heads must be divisible by parallel.tensor = 3"),
    (["optimizer.roles.q.lr=1e-3"], "optimizer.roles must name one of embedding, q_a, q_b,"),
]


@pytest.mark.parametrize(
    ("name", "overrides", "problem"),
    [
        *(("tiny_moe_sso", *case) for case in MIXTURE),
        *(("tiny_deepseek_sso", *case) for case in DEEPSEEK),
        ("tiny_gemma2_sso", ["model.attention_bias=all"], "model.attention_bias must be none for"),
        ("tiny_sso", ["parallel.expert=2"], "parallel.expert must be 1 for model.family llama"),
    ],
)
def test_what_a_family_cannot_be_is_refused(name: str, overrides: list[str], problem: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        recipe(name, *overrides)
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


def test_expert_ranks_must_divide_those_of_a_stage() -> None:
    config = recipe("tiny_moe_sso", "parallel.expert=4", "train.micro_batch=8")
    check(config, 4)
    with pytest.raises(InvalidConfigError, match=r"expert_tensor = 4 \* 1 = 4, got 2"):
        check(config, 2)
