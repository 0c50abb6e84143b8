"""The mixture-of-experts recipes: their sizes are those of the SSO paper, their routers are
AdamW's; and what the config says of experts is checked."""

from pathlib import Path

import pytest

from models.config import ModelConfig
from models.families import FAMILIES
from models.routed_scale import routed_scale
from models.size import model_size
from tests.moe_models import MODEL, model_with
from tests.recipe_rules import RECIPE_RULES as RULES
from training.config import InvalidConfigError, check, load_config
from training.config.checks.roles import roles_of


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize(("size", "ranks"), [("tiny_moe", 2), ("moe_8b_a1b", 8)])
def test_a_recipe_fits_its_machine_and_routes_its_roles(
    root: Path, size: str, ranks: int, optimizer: str
) -> None:
    config = load_config(root / "configs" / f"{size}_{optimizer}.yaml")
    check(config, ranks)
    assert (config.run.name, config.run.dir) == (f"{size}_{optimizer}", f"runs/{config.run.name}")
    settings = config.optimizer.settings_for
    for role in ("q", "o", "gate", "shared_up", "expert_gate", "expert_down"):
        assert settings(role).rule == RULES[optimizer]
    for role in ("router", "shared_router"):
        assert size == "tiny_moe" and role == "shared_router" or settings(role).rule == "adamw"
    sso = load_config(root / "configs" / f"{size}_sso.yaml")
    assert (config.data, config.schedule, config.train.steps) == (
        sso.data,
        sso.schedule,
        sso.train.steps,
    )


def test_the_8b_model_has_the_size_of_the_paper(root: Path) -> None:
    config = load_config(root / "configs" / "moe_8b_a1b_sso.yaml")
    size = model_size(config.model, config.train.sequence_length)
    assert size.parameters == 8_753_947_392
    assert size.active_parameters == 1_392_943_872
    vocabulary = size.parameters_by_role["embedding"] + size.parameters_by_role["head"]
    assert (size.active_parameters - vocabulary) / 1e9 == pytest.approx(0.98, abs=0.005)
    train = config.train
    assert train.global_batch * train.sequence_length == 4_194_304
    assert train.steps * train.global_batch * train.sequence_length / 1e9 == pytest.approx(
        100, 0.001
    )
    moe = config.model.moe
    assert moe is not None and moe.routed_scale is None
    assert routed_scale(moe.experts, moe.top_k, moe.shared_experts, moe.score) == 1.998


def test_the_tiny_model_has_the_size_its_file_says(root: Path) -> None:
    config = load_config(root / "configs" / "tiny_moe_sso.yaml", ["model.vocab_size=4096"])
    size = model_size(config.model, config.train.sequence_length)
    assert (size.parameters / 1e6, size.active_parameters / 1e6) == pytest.approx((2.7, 1.8), 0.02)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        model_with(shared_gate=True),
        model_with(shared_experts=0),
        model_with(dense_layers=0),
    ],
)
def test_roles_are_those_of_the_units(model: ModelConfig, split: bool) -> None:
    units = FAMILIES["moe"].units(model, layers=range(model.layers), split_gate_up=split)
    roles = roles_of(model, "head", split)
    assert {unit.role for unit in units} == set(roles)
    assert len(set(roles)) == len(roles)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.moe=null"], "model.moe must be a section for family moe, got null"),
        (["model.family=qwen3"], "model.moe must be null for family qwen3, got a section"),
        (["model.moe.top_k=9"], "model.moe.top_k must be at most experts = 8, got 9"),
        (["model.moe.top_k=0"], "model.moe.top_k must be at least 1, got 0"),
        (["model.moe.dense_layers=4"], "model.moe.dense_layers must be below layers = 4, got 4"),
        (
            ["model.moe.score=softmax"],
            "model.moe.expert_bias must be false with score softmax, got true",
        ),
        (
            ["model.moe.shared_experts=0", "model.moe.shared_gate=true"],
            "model.moe.shared_gate must be false without shared_experts, got true",
        ),
        (["model.moe.z_loss=-1.0"], "model.moe.z_loss must be at least 0, got -1.0"),
        (["model.moe.routed_scale=0"], "model.moe.routed_scale must be above 0, got 0.0"),
        (["model.moe.expert=8"], "unknown key model.moe.expert; did you mean model.moe.experts?"),
        (
            ["model.attention_backend=transformer_engine"],
            "model.attention_backend must be sdpa for family moe, got transformer_engine",
        ),
        (
            ["parallel.expert=3"],
            "model.moe.experts must be divisible by parallel.expert = 3, got 8",
        ),
        (
            ["parallel.tensor=2", "parallel.sequence=false"],
            "parallel.sequence must be true or null for model.family moe with tensor > 1, "
            "got false",
        ),
        (
            ["model.moe.dense_layers=0", "optimizer.roles.gate.lr=1e-3"],
            "optimizer.roles must name one of embedding, q, k, v, o, shared_gate",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(
    root: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(root / "configs" / "tiny_moe_sso.yaml", overrides)
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


def test_expert_ranks_must_divide_those_of_a_stage(root: Path) -> None:
    config = load_config(
        root / "configs" / "tiny_moe_sso.yaml", ["parallel.expert=4", "train.micro_batch=8"]
    )
    check(config, 4)
    with pytest.raises(InvalidConfigError, match=r"expert_tensor = 4 \* 1 = 4, got 2"):
        check(config, 2)


def test_dense_families_have_no_expert_ranks(root: Path) -> None:
    with pytest.raises(
        InvalidConfigError, match="parallel.expert must be 1 for model.family llama"
    ):
        load_config(root / "configs" / "tiny_sso.yaml", ["parallel.expert=2"])
