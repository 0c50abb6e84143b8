"""Every recipe loads, fits the machine it is meant for and has the sizes of its source."""

from itertools import product
from pathlib import Path

import pytest

from models import families
from tests.recipe_rules import RECIPE_RULES as RULES
from training.config import Config, check, load_config, to_yaml

RANKS = {"tiny": 2, "llama271m": 8, "llama1b": 8}
RECIPES = [f"{size}_{optimizer}" for size, optimizer in product(RANKS, RULES)]


@pytest.fixture
def config(request: pytest.FixtureRequest, root: Path) -> Config:
    return load_config(root / "configs" / f"{request.param}.yaml")


def parameters(config: Config) -> int:
    """Elements of all units of the model, its vocabulary unpadded."""
    model = config.model
    units = families.FAMILIES[model.family].units(model, layers=range(model.layers))
    return sum(unit.numel for unit in units)


def test_the_recipes_are_all_there(root: Path) -> None:
    assert {path.stem for path in (root / "configs").glob("*.yaml")} >= set(RECIPES)


def test_every_file_in_configs_is_a_whole_run(root: Path) -> None:
    for path in (root / "configs").glob("*.yaml"):
        assert load_config(path).run.name == path.stem


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_machine_and_survives_writing(
    root: Path, name: str, tmp_path: Path
) -> None:
    config = load_config(root / "configs" / f"{name}.yaml")
    size, optimizer = name.split("_", 1)
    check(config, RANKS[size])
    assert (config.run.name, config.run.dir) == (name, f"runs/{name}")
    assert config.optimizer.settings_for("gate").rule == RULES[optimizer]
    written = tmp_path / "resolved.yaml"
    written.write_text(to_yaml(config))
    assert load_config(written) == config


@pytest.mark.parametrize(
    "config", ["tiny_adamw", "tiny_muon", "tiny_muon_sphere", "tiny_sso"], indirect=True
)
def test_tiny_recipes_differ_only_in_the_optimizer(config: Config, root: Path) -> None:
    sso = load_config(root / "configs" / "tiny_sso.yaml")
    assert (config.data, config.train, config.schedule) == (sso.data, sso.train, sso.schedule)
    assert list(config.data.train) == list(config.data.validation)
    assert len(config.data.train) == 3
    assert sum(part.weight for part in config.data.train.values()) == pytest.approx(1)


# "PC Layer" paper: parameters in millions with two embeddings of 32,000, tokens in billions.
@pytest.mark.parametrize(
    ("config", "millions", "billions", "passes"),
    [(f"llama271m_{o}", 271.1, 57.7, 5) for o in RULES]
    + [(f"llama1b_{o}", 1056, 160.2, 10) for o in RULES],
    indirect=["config"],
)
def test_llama_recipes_have_the_sizes_of_the_paper(
    config: Config, millions: float, billions: float, passes: int
) -> None:
    train = config.train
    assert parameters(config) / 1e6 == pytest.approx(millions, abs=0.5)
    tokens = train.steps * train.global_batch * train.sequence_length
    assert tokens / 1e9 == pytest.approx(billions, abs=0.05)
    assert train.global_batch * train.sequence_length == 2_621_440
    assert train.global_batch // (train.micro_batch * 8) == passes
    assert config.schedule.warmup_steps == train.steps // 100


@pytest.mark.parametrize(
    ("config", "lr"),
    [
        ("llama271m_adamw", 8.485e-4),
        ("llama1b_adamw", 3e-4),
        ("llama271m_muon", 4.243e-3),
        ("llama1b_muon", 1.5e-3),
        ("llama271m_muon_sphere", 5e-3),
        ("llama1b_sso", 5e-3),
    ],
    indirect=["config"],
)
def test_llama_recipes_have_one_learning_rate(config: Config, lr: float) -> None:
    settings = [config.optimizer.settings_for(role) for role in ("q", "embedding", "head", "gain")]
    assert [s.lr for s in settings] == [lr] * 4
    decays = [s.weight_decay for s in settings[:3]]
    # On a sphere retraction undoes the decay of matrices.
    sphere = settings[0].rule in ("muon_sphere", "spectral_sphere")
    assert decays == [0.0 if sphere else 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    "config",
    [f"{size}_muon_plus_plus" for size in RANKS],
    indirect=True,
)
def test_muon_plus_plus_recipes_are_algorithm_2(config: Config) -> None:
    check(config, RANKS[config.run.name.split("_")[0]])
    rule = config.optimizer.rule("muon_plus_plus")
    assert config.optimizer.settings_for("q").rule == "muon_plus_plus"
    assert config.optimizer.settings_for("q").weight_decay == 0
    assert (rule.algorithm, rule.momentum, rule.nesterov) == ("project_rescale", 0.95, False)
    assert (rule.radius, rule.scale, rule.radius_scaler) == ("spectral_mup", "spectral_mup", 1.0)
    assert config.model.init.spectral and config.model.init.radius == rule.radius


@pytest.mark.parametrize("size", ["160m", "405m", "1.4b"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gram_recipes_have_the_penalty_of_the_paper(root: Path, size: str, optimizer: str) -> None:
    config = load_config(root / "configs" / f"gpt{size}_{optimizer}_gram.yaml")
    plain = load_config(root / "configs" / f"gpt{size}_{optimizer}.yaml", ["gram_penalty={}"])
    assert config.gram_penalty == plain.gram_penalty
    assert config.optimizer == plain.optimizer and config.optimizer.qkv_units == "component"
    check(config, 8)
