"""Recipes load, fit their machines and use the sizes and settings of their sources. Models and
rules can be combined."""

from itertools import product
from math import sqrt
from pathlib import Path

import pytest

from models.config import routed_scale
from models.families import FAMILIES, all_units, model_size
from tests.small_recipes import every_recipe, recipe
from training.config import check, load_config, to_yaml

RULES = {
    "adamw": "adamw",
    "muon": "muon",
    "muon_sphere": "muon_sphere",
    "sso": "spectral_sphere",
    "muon_plus_plus": "muon_plus_plus",
    "sso_paper_adamw": "adamw",
    "sso_paper_muon": "muon",
    "gram_paper_adamw": "adamw",
    "gram_paper_muon": "muon",
}
"""Maps the files in configs/base that set a rule to the rule."""
ON_SPHERES = ("muon_sphere", "spectral_sphere", "muon_plus_plus")

# A rule with a recipe, parameters with both vocabularies, active parameters, billions of tokens and
# tokens per step, from the papers or counted in published weights.
SIZES = {
    "llama271m": ("adamw", 271_090_688, 271_090_688, 57.7, 2_621_440),
    "llama1b": ("muon", 1_055_991_808, 1_055_991_808, 160.2, 2_621_440),
    "llama8b": ("sso", 8_030_261_248, 8_030_261_248, 160.0, 4_194_304),
    "llama3.2_1b": ("sso", 1_235_814_400, 1_235_814_400, 24.7, 4_194_304),
    "qwen2.5_0.5b": ("sso", 494_032_768, 494_032_768, 9.88, 4_194_304),
    "llama70b": ("sso", 70_553_706_496, 70_553_706_496, 1400.0, 4_194_304),
    "qwen3_1.7b": ("sso", 1_820_451_840, 1_820_451_840, 100.0, 4_194_304),
    "deepnet200": ("muon", 889_448_960, 889_448_960, 50.0, 4_194_304),
    "moe_8b_a1b": ("sso", 8_753_947_392, 1_392_943_872, 100.0, 4_194_304),
    "deepseek16b": ("sso", 15_706_484_224, 2_661_150_208, 100.0, 4_194_304),
    "deepseek236b": ("sso", 235_741_434_880, 21_375_800_320, 100.0, 4_194_304),
    "gpt160m": ("adamw", 162_223_872, 162_223_872, 3.244, 1_048_576),
    "gpt405m": ("muon", 405_064_192, 405_064_192, 8.100, 1_048_576),
    "gpt1.4b": ("muon", 1_414_108_160, 1_414_108_160, 28.280, 1_048_576),
}
MODELS = [*SIZES, "tiny", "tiny_moe", "tiny_deepseek"]
"""Files in configs/base that set a model."""
MIXTURES = ("moe_8b_a1b", "deepseek16b")


def rule_of(name: str) -> str:
    """Return the rule for the matrices of a recipe, given by the end of its name."""
    stem = name.removesuffix("_pc").removesuffix("_gram")
    ends = (end for end in sorted(RULES, key=len, reverse=True) if stem.endswith(f"_{end}"))
    return RULES[next(ends)]


@pytest.mark.parametrize("name", every_recipe())
def test_a_recipe_fits_its_machine_and_survives_writing(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    check(config, config.plan.gpus or 0)
    assert (config.run.name, config.run.dir) == (name, f"runs/{name}")
    settings = config.optimizer.settings_for
    assert settings("o").rule == rule_of(name)
    # Parameters that no paper assigns to a spectral rule.
    roles = FAMILIES[config.model.family].roles(config.model, config.optimizer.qkv_units, True)
    for role in {"embedding", "head", "gain", "router"} & set(roles):
        assert settings(role).rule == "adamw"
    # Models that stay on their spheres, as in the SSO paper, begin on these spheres.
    if settings("o").rule in ON_SPHERES or name.startswith(("qwen3_1.7b", "deepnet", "moe_8b")):
        init = config.model.init
        assert (init.spectral, init.radius, init.radius_scaler) == (True, "spectral_mup", 1.0)
    written = tmp_path / "resolved.yaml"
    written.write_text(to_yaml(config))
    assert load_config(written) == config


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_has_the_size_of_its_source(name: str) -> None:
    rule, parameters, active, billions, tokens_per_step = SIZES[name]
    config = recipe(f"{name}_{rule}")
    size = model_size(config.model, config.train.sequence_length)
    assert (size.parameters, size.active_parameters) == (parameters, active)
    assert config.train.global_batch * config.train.sequence_length == tokens_per_step
    assert config.train.steps * tokens_per_step / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(("name", "scale"), [("moe_8b_a1b_sso", 1.998), ("deepseek16b_sso", 3.46)])
def test_a_null_routed_scale_is_the_papers(name: str, scale: float) -> None:
    moe = recipe(name).model.moe
    assert moe is not None and moe.routed_scale is None
    found = routed_scale(moe.experts, moe.top_k, moe.shared_experts, moe.score)
    assert found == pytest.approx(scale, abs=0.005)


@pytest.mark.parametrize(
    ("name", "bound", "exact"),
    [("llama1b_adamw_pc", 0.391, 0.258), ("llama1b_muon_pc", 0.235, 0.191)],
)
def test_pc_layers_cost_what_their_paper_counts(name: str, bound: float, exact: float) -> None:
    """Test the FLOPs of PC layers relative to the FLOPs of the blocks, in percent (appendix G.1): k
    products with the smaller Gram matrix, q power iterations, and twice as many FLOPs in the
    backward pass."""
    config = recipe(name)
    assert config.pc is not None and config.pc.level is not None
    k, q = config.pc.level, config.pc.steps
    tokens = config.train.global_batch * config.train.sequence_length
    covered = ("o", "gate", "up", "down")
    sides = [sorted(unit.shape) for unit in all_units(config.model) if unit.role in covered]
    blocks = sum(6 * s * long * tokens for s, long in sides)
    most = sum(6 * (k + 1) * long * s * s + 6 * (2 * q + 1) * long * s for s, long in sides)
    terms = sum(
        3 * (4 * long * s * s + 2 * (k - 1) * s**3 + (4 * q + 2) * long * s) for s, long in sides
    )
    assert 100 * most / blocks == pytest.approx(bound, abs=5e-4)
    assert 100 * terms / blocks == pytest.approx(exact, abs=5e-4)


@pytest.mark.parametrize(("width", "millions"), [(256, 73), (512, 191), (1024, 558), (2048, 1820)])
def test_the_width_sweep_is_that_of_the_sso_paper(width: int, millions: int) -> None:
    """The models have 70M to 1.8B parameters and heads of constant size, and train on 30B tokens
    (A.5)."""
    config = recipe(f"qwen3_width{width}_sso")
    model, train = config.model, config.train
    assert (model.hidden, model.heads * 128, model.ffn) == (width, width, 3 * width)
    size = model_size(model, train.sequence_length)
    assert round(size.parameters / 1e6) == millions
    tokens = train.steps * train.global_batch * train.sequence_length
    assert tokens / 30e9 == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny_sso", []),
        ("tiny_qwen3_sso", []),
        ("tiny_gpt_muon", []),
        ("tiny_deepseek_sso", []),
        ("deepseek16b_sso", []),
        ("tiny_moe_sso", ["model.moe.shared_gate=true"]),
        ("tiny_moe_sso", ["model.moe.shared_experts=0"]),
        ("tiny_moe_sso", ["model.moe.dense_layers=0"]),
    ],
)
def test_roles_are_those_of_the_units(name: str, keys: list[str]) -> None:
    model = recipe(name, "model.vocab_size=128", *keys).model
    family = FAMILIES[model.family]
    for units, split in product(("head", "group", "component", "fused"), (True, False)):
        found = family.units(model, layers=range(2), qkv_units=units, split_gate_up=split)
        roles = family.roles(model, units, split)
        assert {unit.role for unit in found} == set(roles), (units, split)
        assert len(set(roles)) == len(roles), (units, split)


def test_dense_1_7b_has_the_atomic_modules_of_the_sso_paper() -> None:
    """The model has 1008 modules. The radius is 0.25 for q, k and v, 1 for o, 1.732 for gate and
    up, and 0.577 for down."""
    model = recipe("qwen3_1.7b_sso").model
    matrices = [u for u in all_units(model) if u.is_matrix and u.role not in ("embedding", "head")]
    assert len(matrices) == 36 * 28 and model.padded_vocab == 100_352
    radii = {u.role: round(sqrt(u.shape[0] / u.shape[1]), 3) for u in matrices}
    assert radii == {
        "q": 0.25, "k": 0.25, "v": 0.25, "o": 1.0, "gate": 1.732, "up": 1.732, "down": 0.577,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rates", "decays"),
    [
        # Rates and decays of gate, embedding, head and gains.
        ("llama271m_adamw", (8.485e-4,) * 4, (0.1,) * 4),
        ("llama1b_adamw", (3e-4,) * 4, (0.1,) * 4),
        ("llama271m_muon", (4.243e-3,) * 4, (0.1,) * 4),
        ("llama1b_muon", (1.5e-3,) * 4, (0.1,) * 4),
        # On a sphere the retraction undoes the decay of matrices.
        ("llama1b_sso", (5e-3,) * 4, (0.0, 0.1, 0.1, 0.0)),
        ("qwen3_1.7b_adamw", (5e-3,) * 4, (0.1, 0.1, 0.1, 0.0)),
        ("qwen3_1.7b_muon", (5e-3,) * 4, (0.1, 0.1, 0.1, 0.0)),
        ("deepnet200_muon_sphere", (5e-3,) * 4, (0.0, 0.1, 0.1, 0.0)),
        ("moe_8b_a1b_adamw", (5e-3,) * 4, (0.1, 0.1, 0.1, 0.0)),
        ("moe_8b_a1b_sso", (5e-3,) * 4, (0.0, 0.1, 0.1, 0.0)),
        ("gpt160m_adamw", (2e-3,) * 4, (0.01, 0.0, 0.0, 0.0)),
        ("gpt160m_muon", (1e-2, 1e-2, 1e-2 / sqrt(768), 1e-2), (0.01, 0.0, 0.0, 0.0)),
        ("gpt405m_muon", (1e-2, 1e-2, 1e-2 / sqrt(1024), 1e-2), (0.01, 0.0, 0.0, 0.0)),
        ("gpt1.4b_muon", (1e-2, 1e-2, 1e-2 / sqrt(2048), 1e-2), (0.01, 0.0, 0.0, 0.0)),
    ],
)
def test_rates_and_decays_are_those_of_the_paper(name, rates, decays) -> None:
    config = recipe(name)
    settings = [config.optimizer.settings_for(role) for role in ("up", "embedding", "head", "gain")]
    assert [each.lr for each in settings] == pytest.approx(rates, rel=1e-3)
    assert tuple(each.weight_decay for each in settings) == decays


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama1b_muon", ("simple", 5, 0.95, True, "align_adam_rms")),
        ("gpt160m_muon", ("quintic", 5, 0.95, False, "spectral_mup")),
        ("qwen3_1.7b_muon", ("polar_express", 8, 0.9, True, "spectral_mup")),
        ("qwen3_1.7b_muon_sphere", ("polar_express", 8, 0.9, True, "spectral_mup")),
        ("deepnet200_sso", ("polar_express", 8, 0.9, True, "spectral_mup")),
        ("llama271m_muon_plus_plus", ("polar_express", 8, 0.95, False, "spectral_mup")),
    ],
)
def test_rules_are_those_of_the_paper(name: str, settings: tuple[object, ...]) -> None:
    config = recipe(name)
    rule = config.optimizer.rule(rule_of(name))
    found = (rule.schedule, rule.steps, rule.momentum, rule.nesterov, rule.scale)
    assert found == settings
    paper = "component" if name.startswith(("llama", "gpt")) else "head"
    assert config.optimizer.qkv_units == paper
    assert config.optimizer.clip.max_norm == (None if name.startswith("gpt") else 1.0)
    if rule_of(name) in ON_SPHERES:
        assert (rule.radius, rule.radius_scaler) == ("spectral_mup", 1.0)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama271m_muon", ("cosine", 220, 0.1)),
        ("llama1b_muon", ("cosine", 611, 0.1)),
        ("qwen3_1.7b_sso", ("cosine", 500, 0.1)),
        ("gpt405m_muon", ("wsd", 0, 0.0)),
    ],
)
def test_schedules_are_those_of_the_paper(name: str, schedule: tuple[str, int, float]) -> None:
    found = recipe(name).schedule
    assert (found.kind, found.warmup_steps, found.min_ratio) == schedule


@pytest.mark.parametrize("name", ["gpt160m_adamw", "gpt160m_muon", "gpt1.4b_muon"])
def test_a_gram_recipe_is_its_plain_twin_with_the_papers_penalty(name: str) -> None:
    penalised, plain = recipe(f"{name}_gram"), recipe(name, "gram_penalty={}")
    assert penalised.gram_penalty == plain.gram_penalty
    assert penalised.optimizer == plain.optimizer


def composed(folder: Path, model: str, rule: str) -> Path:
    """Write a config file, as a user would, that combines a rule and a model."""
    base = [str(Path("configs/base").resolve() / f"{name}.yaml") for name in (model, rule)]
    path = folder / "mine.yaml"
    path.write_text(
        f"base: [{', '.join(base)}]\nrun: {{name: mine}}\noptimizer: {{matrix: {{lr: 1.0e-3}}}}\n"
    )
    return path


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        # Every run tests every model and every rule; slow tests cover all pairs of a family.
        pytest.param(model, rule, marks=[] if i % len(RULES) == j else [pytest.mark.slow])
        for i, model in enumerate(MODELS)
        for j, rule in enumerate(RULES)
        # The Gram paper's Muon uses a separate rate of the head for each model.
        if (rule != "gram_paper_muon" or model.startswith("gpt"))
        and (i % len(RULES) == j or model in ("llama1b", "qwen3_1.7b", "gpt160m", *MIXTURES))
    ],
)
def test_any_model_trains_under_any_rule_in_three_lines(tmp_path, monkeypatch, root, model, rule):
    monkeypatch.chdir(root)
    config = load_config(composed(tmp_path, model, rule))
    check(config, config.plan.gpus or 0)
    settings = config.optimizer.settings_for
    assert (settings("o").rule, settings("o").lr) == (RULES[rule], 1e-3)
    assert config.run.dir == "runs/mine" and settings("embedding").lr > 0
