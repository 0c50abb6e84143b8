"""The recipes of the Qwen3, DeepNet and GPT models have the sizes and settings of their papers."""

from dataclasses import replace
from itertools import product
from math import sqrt
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.size import all_units, model_size
from tests.recipe_rules import RECIPE_RULES as RULES
from training.config import Config, check, load_config, to_yaml

# Name of the size: (ranks that it is checked on, millions of parameters with both vocabularies as
# stored, billions of tokens, tokens per step).
SIZES = {
    "qwen3_1.7b": (64, 1820.4, 100.0, 4_194_304),
    "deepnet200": (64, 889.4, 50.0, 4_194_304),
    "gpt160m": (8, 162.2, 3.244, 1_048_576),
    "gpt405m": (8, 405.1, 8.100, 1_048_576),
    "gpt1.4b": (8, 1414.1, 28.280, 1_048_576),
}
RECIPES = list(product(SIZES, RULES))
GPT = {"gpt160m": 2048, "gpt405m": 2752, "gpt1.4b": 5440}
TINY = ["tiny_qwen3_sso", "tiny_gpt_muon", "tiny_deepnet_sso"]


def recipe(root: Path, name: str, *overrides: str) -> Config:
    """The config of a recipe."""
    return load_config(root / "configs" / f"{name}.yaml", overrides)


def by_role(model: ModelConfig) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of the units of each role."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for unit in all_units(model):
        shapes.setdefault(unit.role, set()).add(unit.shape)
    return shapes


@pytest.mark.parametrize(("size", "optimizer"), RECIPES)
def test_a_recipe_has_the_size_of_its_paper(
    root: Path, size: str, optimizer: str, tmp_path: Path
) -> None:
    name = f"{size}_{optimizer}"
    config = recipe(root, name)
    ranks, millions, billions, tokens_per_step = SIZES[size]
    check(config, ranks)
    assert (config.run.name, config.run.dir) == (name, f"runs/{name}")
    train = config.train
    assert model_size(config.model, train.sequence_length).parameters / 1e6 == pytest.approx(
        millions, abs=0.1
    )
    assert train.global_batch * train.sequence_length == tokens_per_step
    assert train.steps * tokens_per_step / 1e9 == pytest.approx(billions, abs=0.005)
    assert config.optimizer.settings_for("q").rule == RULES[optimizer]
    assert config.optimizer.settings_for("head").rule == "adamw"
    written = tmp_path / "resolved.yaml"
    written.write_text(to_yaml(config))
    assert load_config(written) == config


def test_dense_1_7b_has_the_atomic_modules_of_the_sso_paper(root: Path) -> None:
    """1008 of them, and their radii: q, k, v 0.25, o 1, gate and up 1.732, down 0.577."""
    model = recipe(root, "qwen3_1.7b_sso").model
    assert model.padded_vocab == 100_352
    matrices = [u for u in all_units(model) if u.is_matrix and u.role not in ("embedding", "head")]
    assert len(matrices) == 36 * 28
    radii = {u.role: round(sqrt(u.shape[0] / u.shape[1]), 3) for u in matrices}
    assert radii == {
        "q": 0.25, "k": 0.25, "v": 0.25, "o": 1.0, "gate": 1.732, "up": 1.732, "down": 0.577,
    }  # fmt: skip


def test_deepnets_attention_is_wider_than_its_residual_stream(root: Path) -> None:
    shapes = by_role(recipe(root, "deepnet200_sso").model)
    assert shapes["o"] == {(512, 1024)}
    assert shapes["q"] == shapes["k"] == shapes["v"] == {(128, 512)}
    assert shapes["gain"] == {(512,), (128,)}


@pytest.mark.parametrize("size", ["qwen3_1.7b", "deepnet200"])
@pytest.mark.parametrize("optimizer", RULES)
def test_every_optimizer_of_the_sso_paper_has_its_common_settings(
    root: Path, size: str, optimizer: str
) -> None:
    config = recipe(root, f"{size}_{optimizer}")
    settings = [config.optimizer.settings_for(role) for role in ("q", "down", "embedding", "head")]
    assert {s.lr for s in settings} == {5e-3}
    # On a sphere the retraction would undo the decay of matrices.
    matrices = 0.0 if optimizer in ("muon_sphere", "sso") else 0.1
    assert [s.weight_decay for s in settings] == [matrices, matrices, 0.1, 0.1]
    assert config.schedule.warmup_steps == 500 and config.schedule.min_ratio == 0.1
    assert config.optimizer.qkv_units == "head" and config.optimizer.clip.max_norm == 1.0
    assert config.model.init.spectral and config.model.init.std == 0.02
    for name in ("muon", "muon_sphere", "spectral_sphere"):
        if name == RULES[optimizer]:
            rule = config.optimizer.rule(name)
            assert (rule.momentum, rule.nesterov, rule.steps) == (0.9, True, 8)
            assert (rule.scale, rule.schedule) == ("spectral_mup", "polar_express")


@pytest.mark.parametrize(
    ("name", "lr"),
    [("gpt160m_adamw", 2e-3), ("gpt405m_adamw", 1.6e-3), ("gpt1.4b_adamw", 1.2e-3)]
    + [(f"{size}_muon", 1e-2) for size in GPT],
)
def test_gpt_recipes_have_the_rates_of_their_paper(root: Path, name: str, lr: float) -> None:
    config = recipe(root, name)
    settings = config.optimizer.settings_for("up")
    assert (settings.lr, settings.weight_decay) == (lr, 0.01)
    assert config.optimizer.settings_for("embedding").lr == lr
    scale = config.model.hidden**-0.5
    head = lr if name.endswith("adamw") else lr * scale
    assert config.optimizer.settings_for("head").lr == pytest.approx(head, rel=1e-3)
    assert config.model.init.head_std == pytest.approx(scale, rel=1e-3)
    assert config.schedule.kind == "wsd" and config.schedule.cooldown_fraction == 0.1
    assert config.model.padded_vocab == 50_304
    if name.endswith("muon"):
        rule = config.optimizer.rule("muon")
        assert (rule.momentum, rule.nesterov, rule.scale) == (0.95, False, "spectral_mup")
        assert config.optimizer.qkv_units == "component"


@pytest.mark.parametrize("size", GPT)
def test_the_swiglu_twin_of_a_gpt_has_as_many_parameters(root: Path, size: str) -> None:
    """Within the rounding of its width to a multiple of 64, 0.8% of the feed-forward block."""
    plain = recipe(root, f"{size}_muon").model
    gated = recipe(root, f"{size}_muon", "model.activation=swiglu", f"model.ffn={GPT[size]}").model
    assert abs(gated.ffn - 8 / 3 * plain.hidden) <= 32
    sizes = [model_size(model, 1024).parameters for model in (plain, gated)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.008)
    assert "gate" in by_role(gated) and "gate" not in by_role(plain)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_twin_is_its_model_but_small(root: Path, name: str) -> None:
    config = recipe(root, name)
    check(config, 2)
    assert (config.run.name, config.run.dir) == (name, f"runs/{name}")
    big = {"qwen3": "qwen3_1.7b_sso", "gpt": "gpt160m_muon", "deepnet": "deepnet200_sso"}
    twin = recipe(root, big[config.model.family])
    tiny = replace(config.model, vocab_size=4096)
    assert model_size(tiny, 128).parameters < 4e6
    for field in ("family", "activation", "qk_norm"):
        assert getattr(tiny, field) == getattr(twin.model, field)
    assert config.optimizer.qkv_units == twin.optimizer.qkv_units
    assert config.optimizer.matrix.rule == twin.optimizer.matrix.rule
    assert by_role(tiny).keys() == by_role(twin.model).keys()
    if tiny.family == "deepnet":
        assert tiny.layers == twin.model.layers == 200
        assert tiny.heads * tiny.head_size > tiny.hidden


def test_the_deepnet_twin_of_adamw_differs_in_what_updates_matrices_alone(root: Path) -> None:
    sso, adamw = (recipe(root, f"tiny_deepnet_{optimizer}") for optimizer in ("sso", "adamw"))
    assert adamw.run.name == "tiny_deepnet_adamw"
    assert replace(adamw.model, init=sso.model.init) == sso.model
    assert (adamw.train, adamw.data, adamw.schedule) == (sso.train, sso.data, sso.schedule)
    plain = recipe(root, "tiny_adamw")
    assert (adamw.optimizer.matrix, adamw.model.init) == (plain.optimizer.matrix, plain.model.init)
    for role in ("embedding", "head", "gain"):
        assert adamw.optimizer.settings_for(role) == sso.optimizer.settings_for(role)
