"""Old names of keys and values: refused in a config, translated in a checkpoint's."""

from pathlib import Path

import pytest
import yaml

from tests.minimal_config import problems
from training.config import load_config, load_saved_config, to_yaml
from training.config.binding import schema_paths
from training.config.renamed import RENAMED_KEYS, RENAMED_VALUES, translate
from training.config.schema import Config


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "optimizer.clip.whole_matrix_roles=false",
            "optimizer.clip.whole_matrix_roles is now optimizer.clip.matrix_roles",
        ),
        (
            "optimizer.distributed.tensor_mode=home",
            "optimizer.distributed.tensor_mode: home is now owner",
        ),
        (
            "optimizer.rules.spectral_sphere.power_iteration_steps=6",
            "optimizer.rules.spectral_sphere.power_iteration_steps is now "
            "optimizer.rules.spectral_sphere.krylov_steps, 3 in place of 6",
        ),
        (  # two vectors as before
            "optimizer.rules.muon_plus_plus.power_iteration_steps=6",
            "optimizer.rules.muon_plus_plus.power_iteration_steps is now "
            "optimizer.rules.muon_plus_plus.krylov_steps",
        ),
    ],
)
def test_an_old_name_is_refused_with_the_present_one(
    minimal: Path, override: str, problem: str
) -> None:
    assert problems(minimal, override) == [problem]


def test_what_no_value_could_be_is_not_converted(minimal: Path) -> None:
    assert problems(minimal, "optimizer.rules.muon_sphere.power_iteration_steps=-20") == [
        "optimizer.rules.muon_sphere.power_iteration_steps is now "
        "optimizer.rules.muon_sphere.krylov_steps",
        "optimizer.rules.muon_sphere.krylov_steps must be at least 1, got -20",
    ]


def test_old_names_are_refused_together_with_what_else_is_wrong(minimal: Path) -> None:
    found = problems(
        minimal,
        "optimizer.clip.whole_matrix_roles=maybe",
        "optimizer.distributed.tensor_mode=home",
        "train.steps=0",
    )
    assert [line.split(" ")[0] for line in found] == [
        "optimizer.clip.whole_matrix_roles",
        "optimizer.distributed.tensor_mode:",
        "train.steps",
        "optimizer.clip.matrix_roles",
    ]


def test_a_saved_config_is_read_under_old_and_present_names(minimal: Path) -> None:
    steps = "optimizer.rules.muon_sphere.krylov_steps=3"
    config = load_config(minimal, ["optimizer.clip.matrix_roles=false", steps])
    old = yaml.safe_load(to_yaml(config))
    old["optimizer"]["clip"]["whole_matrix_roles"] = old["optimizer"]["clip"].pop("matrix_roles")
    old["optimizer"]["distributed"]["tensor_mode"] = "home"
    sphere = old["optimizer"]["rules"]["muon_sphere"]
    assert sphere.pop("krylov_steps") == 3
    sphere["power_iteration_steps"] = 6
    minimal.write_text(yaml.safe_dump(old))
    assert load_saved_config(minimal) == config


def test_where_both_names_are_set_the_present_one_counts() -> None:
    both = {"optimizer": {"clip": {"matrix_roles": True, "whole_matrix_roles": False}}}
    assert translate(both)[0] == {"optimizer": {"clip": {"matrix_roles": True}}}
    assert both["optimizer"]["clip"] == {"matrix_roles": True, "whole_matrix_roles": False}


def test_present_names_are_keys_and_old_ones_are_not() -> None:
    paths = dict(schema_paths(Config))
    assert set(RENAMED_KEYS.values()) | set(RENAMED_VALUES) <= paths.keys()
    assert not set(RENAMED_KEYS) & paths.keys()


@pytest.mark.parametrize("content", [{}, {"optimizer": 3}, {"optimizer": {"clip": None}}])
def test_what_is_no_section_is_left_for_binding_to_refuse(content: dict[str, object]) -> None:
    assert translate(content) == (content, [])


@pytest.mark.parametrize("rule", ["spectral_sphere", "muon_plus_plus"])
def test_a_tolerance_that_bfloat16_cannot_tell_leaves_a_checkpoint_readable(
    minimal: Path, tmp_path: Path, rule: str
) -> None:
    content = yaml.safe_load(to_yaml(load_config(minimal)))
    content["optimizer"]["rules"][rule] |= {"msign_dtype": "bfloat16", "tolerance": 2e-4}
    saved = tmp_path / "saved.yaml"
    saved.write_text(yaml.safe_dump(content))
    found = load_saved_config(saved).optimizer.rule(rule)
    assert found.settings()["tolerance"] == 5e-3
