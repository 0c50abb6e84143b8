"""What a new user is told: other names of rules, missing trackers, models of another size."""

from dataclasses import asdict, replace

import pytest

from models.config import LatentConfig, ModelConfig
from models.families import FAMILIES
from tests.minimal_config import problems
from tests.moe_models import MODEL
from training.checkpoint.identity import SIZES, refusal
from training.config.files import flat

LATENT = LatentConfig(query_rank=8, kv_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=12)
BASE = replace(MODEL, vocab_size=100)
MODELS = [
    BASE,
    replace(BASE, family="deepseek", kv_heads=None, head_dim=None, qk_norm=False, latent=LATENT),
    ModelConfig(family="qwen3", layers=3, hidden=32, heads=4, ffn=48, vocab_size=100, qk_norm=True),
]
OTHER = {
    "latent": None,
    "moe": None,
    "family": "gemma2",
    "score": "softmax",
    "activation": "geglu",
    "backend": "grouped",
}
"""Another value of keys that are no numbers; a section that is absent stays so."""


def weights(model: ModelConfig) -> set[tuple[str, tuple[int, ...]]]:
    """Parameters and their shapes, whole."""
    units = FAMILIES[model.family].units(model, layers=range(model.layers))
    return {(unit.name, unit.axes) for unit in units}


def changed(model: ModelConfig, key: str, value: object) -> ModelConfig:
    """`model` with another value of a dotted key."""
    section, _, name = key.rpartition(".")
    if not section:
        return replace(model, **{key: value})
    return replace(model, **{section: replace(getattr(model, section), **{name: value})})


def keys_of_weights() -> set[str]:
    """The keys of a model's section with which its weights, or their shapes, change."""
    found = set()
    for model in MODELS:
        for key, value in flat(asdict(model)):
            name = key.rpartition(".")[2]
            other = OTHER.get(name, not value if isinstance(value, bool) else 2 * (value or 4))
            try:
                different = weights(changed(model, key, other)) != weights(model)
            except (ValueError, TypeError, ZeroDivisionError):  # no such model
                continue
            found |= {key} if different else set()
    return found


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("sso", "spectral_sphere"),
        ("SpectralSphere", "spectral_sphere"),
        ("muon++", "muon_plus_plus"),
    ],
)
def test_other_names_of_a_rule_are_known(word, rule, minimal):
    (line,) = problems(minimal, f"optimizer.matrix.rule={word}")
    assert line.endswith(f"got {word!r}; did you mean {rule}?")


def test_a_model_of_another_size_is_not_offered_to_be_loaded():
    size = refusal("step_1", {"model": ["hidden was 64, is 128"]})
    assert "allow_change" not in size and "--resume none" in size and "run.dir" in size
    value = refusal("step_1", {"model": ["rope_theta was 1, is 2"]})
    assert "checkpoint.allow_change=[model]" in value


def test_every_key_that_changes_weights_is_known_as_a_size():
    assert keys_of_weights() == set(SIZES)
