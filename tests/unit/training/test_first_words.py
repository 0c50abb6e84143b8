"""What a new user is told: other names of rules, missing trackers, models of another size."""

import builtins

import pytest

from tests.run_configs import tiny_config
from training.checkpoint.identity import refusal
from training.config.sections.optimizer import rule_problem
from training.report.trackers import Trackers


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("sso", "spectral_sphere"),
        ("SpectralSphere", "spectral_sphere"),
        ("muon++", "muon_plus_plus"),
    ],
)
def test_other_names_of_a_rule_are_known(word, rule):
    assert rule_problem(word).endswith(f"got {word!r}; did you mean {rule}?")


def test_a_model_of_another_size_is_not_offered_to_be_loaded():
    size = refusal("step_1", {"model": ["hidden was 64, is 128"]})
    assert "allow_change" not in size and "--resume none" in size and "run.dir" in size
    value = refusal("step_1", {"model": ["rope_theta was 1, is 2"]})
    assert "checkpoint.allow_change=[model]" in value


def test_a_tracker_that_is_not_installed_never_got_metrics(tmp_path, monkeypatch, capsys):
    known = builtins.__import__

    def without(name, *arguments, **options):
        if name == "torch.utils.tensorboard":
            raise ImportError("No module named 'tensorboard'")
        return known(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    Trackers(tiny_config(str(tmp_path), log__trackers="[tensorboard]"), run_id="", step=0)
    assert capsys.readouterr().out == (
        "warning: tensorboard gets no metrics: No module named 'tensorboard': "
        "pip install tensorboard\n"
    )
