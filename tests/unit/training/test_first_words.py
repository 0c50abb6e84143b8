"""What a new user is told: other names of rules, missing trackers, models of another size."""

import pytest

from tests.minimal_config import problems
from training.checkpoint.identity import differences, refusal, settings
from training.config import load_config


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


@pytest.mark.parametrize(
    ("key", "fits"),
    [("model.heads=2", False), ("model.ffn=64", False), ("model.rope_base=1", True)],
)
def test_a_model_of_another_size_is_not_offered_to_be_loaded(key, fits, minimal):
    before, now = (
        settings(load_config(minimal, ["model.vocab_size=100", *keys])) for keys in ([], [key])
    )
    said = refusal("step_1", differences(before, now, ()))
    assert ("checkpoint.allow_change=[model]" in said) == fits
    assert ("name another run.dir" in said) != fits and "--resume none" in said
