"""The DeepSeek recipes have the sizes of DeepSeek-V2 and its Lite, and what Hugging Face cannot
express is refused."""

from pathlib import Path

import pytest

from models.config import ModelConfig
from models.families import FAMILIES
from models.routed_scale import routed_scale
from models.size import model_size
from tests.recipe_rules import RECIPE_RULES as RULES
from training.config import InvalidConfigError, check, load_config
from training.config.checks.roles import roles_of

# Parameters as counted from the published weights of DeepSeek-V2-Lite and DeepSeek-V2, and those
# that a token uses, which their authors give as 2.4B and 21B without embedding and head.
SIZES = {
    "deepseek16b": (15_706_484_224, 2_661_150_208, 2.24),
    "deepseek236b": (235_741_434_880, 21_375_800_320, 20.3),
}
RANKS = {"tiny_deepseek": 2, "deepseek16b": 16, "deepseek236b": 256}


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("size", RANKS)
def test_a_recipe_fits_its_machine_and_routes_its_roles(
    root: Path, size: str, optimizer: str
) -> None:
    config = load_config(root / "configs" / f"{size}_{optimizer}.yaml")
    check(config, RANKS[size])
    assert (config.run.name, config.run.dir) == (f"{size}_{optimizer}", f"runs/{config.run.name}")
    settings = config.optimizer.settings_for
    for role in ("q_b", "kv_a", "k_b", "v_b", "o", "gate", "shared_up", "expert_down"):
        assert settings(role).rule == RULES[optimizer]
    assert settings("router").rule == "adamw"


@pytest.mark.parametrize("size", SIZES)
def test_the_large_models_have_the_published_sizes(root: Path, size: str) -> None:
    config = load_config(root / "configs" / f"{size}_sso.yaml")
    counted = model_size(config.model, config.train.sequence_length)
    total, active, inner = SIZES[size]
    assert (counted.parameters, counted.active_parameters) == (total, active)
    vocabulary = counted.parameters_by_role["embedding"] + counted.parameters_by_role["head"]
    assert (active - vocabulary) / 1e9 == pytest.approx(inner, abs=0.05)
    moe = config.model.moe
    assert moe is not None and moe.routed_scale is None
    assert routed_scale(moe.experts, moe.top_k, moe.shared_experts, moe.score) == pytest.approx(
        3.46, abs=0.005
    )


def test_flops_count_the_sizes_of_keys_and_values(root: Path) -> None:
    config = load_config(root / "configs" / "deepseek16b_sso.yaml")
    short, long = (model_size(config.model, length).flops_per_token for length in (1, 1001))
    assert long - short == 1000 * 3 * 27 * 16 * (192 + 128)


@pytest.mark.parametrize("units", ["head", "group", "component", "fused"])
@pytest.mark.parametrize("name", ["tiny_deepseek_sso", "deepseek16b_sso"])
def test_roles_are_those_of_the_units(root: Path, name: str, units: str) -> None:
    model = load_config(root / "configs" / f"{name}.yaml", ["model.vocab_size=128"]).model
    assert {role for role, _ in roles_and_names(model, units)} == set(roles_of(model, units, True))


def roles_and_names(model: ModelConfig, units: str) -> set[tuple[str, str]]:
    """(role, name) of the units of the first two layers and what lies outside of them."""
    found = FAMILIES["deepseek"].units(model, layers=range(2), qkv_units=units)
    return {(unit.role, unit.name) for unit in found}


NOTHING_ELSE = ": transformers' DeepseekV3 has no setting for it"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.latent=null"], "model.latent must be a section for family deepseek, got null"),
        (["model.family=moe"], "model.latent must be null for family moe, got a section"),
        (["model.latent.kv_rank=0"], "model.latent.kv_rank must be at least 1, got 0"),
        (
            ["model.latent.rope_head_dim=5"],
            "model.latent.rope_head_dim must be even for rotary positions, got 5",
        ),
        (
            ["model.kv_heads=2"],
            f"model.kv_heads must be null or heads = 4, got 2{NOTHING_ELSE}",
        ),
        (
            ["model.head_dim=32"],
            "model.head_dim must be null beside latent, which has the sizes, got 32",
        ),
        (
            ["model.norm_epsilon=1e-5"],
            f"model.norm_epsilon must be 1e-06, got 1e-05{NOTHING_ELSE}",
        ),
        (
            ["model.moe.score=softmax", "model.moe.expert_bias=false"],
            f"model.moe.score must be sigmoid, got softmax{NOTHING_ELSE}",
        ),
        (
            ["model.moe.shared_gate=true"],
            f"model.moe.shared_gate must be false, got true{NOTHING_ELSE}",
        ),
        (
            ["model.moe.shared_experts=0"],
            f"model.moe.shared_experts must be at least 1, got 0{NOTHING_ELSE}",
        ),
        (
            ["model.moe.expert_groups=8"],
            "model.moe.experts must be at least two for each of expert_groups = 8, got 8",
        ),
        (
            ["model.moe.expert_groups=2", "model.moe.top_groups=2"],
            "model.moe.top_k must be two or a bit more, less than three, for each of top_groups = "
            "2, got 2",
        ),
        (
            ["model.moe.expert_groups=3"],
            "model.moe.expert_groups must divide experts = 8, got 3",
        ),
        (
            ["model.moe.expert_groups=2", "model.moe.top_groups=3"],
            "model.moe.top_groups must be in [1, expert_groups = 2], got 3",
        ),
        (
            ["model.moe.expert_groups=4", "model.moe.top_k=3"],
            "model.moe.top_k must be from top_groups = 1 to the 2 experts of so many groups, got 3",
        ),
        (["model.moe.top_groups=2"], "model.moe.top_groups must be 1 without expert_groups, got 2"),
        (["model.qk_norm=true"], "model.qk_norm must be false for family deepseek, got true"),
        (["model.activation=relu2"], "model.activation must be swiglu for family deepseek"),
        (["parallel.tensor=3"], "model.heads must be divisible by parallel.tensor = 3, got 4"),
        (["optimizer.roles.q.lr=1e-3"], "optimizer.roles must name one of embedding, q_a, q_b,"),
    ],
)
def test_what_cannot_be_is_refused(root: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(root / "configs" / "tiny_deepseek_sso.yaml", overrides)
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems
