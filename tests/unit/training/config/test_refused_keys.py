"""Rejected settings: absurd numbers, which must not reach any loop or allocation, and settings with
no effect, which would make a run differ from its config."""

import re
import time
from operator import attrgetter

import pytest
import yaml

from tests.minimal_config import problems
from tests.paths import ROOT
from training.config import InvalidConfigError, effects, load_config, load_saved_config, to_yaml
from training.config.effects import settings_of_unused_rules, without_effect

ABSURD = {
    "model.layers": 10**9,
    "model.hidden": 10**12,
    "model.heads": 10**9,
    "model.vocab_size": 10**18,
    "train.steps": 10**30,
    "train.global_batch": 10**15,
    "train.micro_batch": 10**15,
    "train.sequence_length": 10**12,
    "data.workers": 10**6,
    "parallel.timeout_seconds": 1e300,
    "parallel.tensor": 10**9,
    "watchdog.hang_seconds": 1e300,
    "stop.slurm_margin_seconds": 1e300,
    "spikes.window": 10**12,
    "optimizer.rules.muon.steps": 10**8,
    "optimizer.rules.spectral_sphere.krylov_steps": 10**8,
    "optimizer.rules.spectral_sphere.max_evaluations": 10**8,
    "monitors.noise_samples": 10**9,
    "log.interval": 10**30,
    "seed": 10**30,
    "optimizer.matrix.lr": 1e200,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", ABSURD)
def test_an_absurd_number_is_named(key: str, minimal) -> None:
    start = time.process_time()
    said = problems(minimal, f"{key}={ABSURD[key]}")
    assert all(line.startswith(f"{key} must") for line in said)
    assert time.process_time() - start < 5


def test_many_matrices_in_all_layers_together_are_too_many(minimal) -> None:
    (line,) = problems(minimal, "model.layers=10000", "model.heads=8192", "model.hidden=1048576")
    assert line == "model.heads times model.layers must be at most 262144, got 8192 times 10000"


def test_a_tracker_is_named_once(minimal) -> None:
    (line,) = problems(minimal, "log.trackers=[wandb,tensorboard,wandb]")
    assert line.startswith("log.trackers must not contain duplicates, got ") and "wandb" in line


# --- keys without effect ------------------------------------------------------------------------

# For each: the cause of a key without effect, the key, its default, and another value.
CASES = [
    ("pc.polynomial.kind=over_flattening", "pc.level", "null", 2),
    ("pc.polynomial.kind=fitted", "pc.level", "null", 2),
    ("model.tie_embeddings=true", "model.init.head_std", 0.02, 0.1),
    ("model.init.spectral=true", "model.init.std", 0.02, 0.03),
    ("model.init.spectral=true", "model.init.depth_scaled", "false", "true"),
    ("model.init.spectral=true", "model.init.depth_scaling", "'layers'", "layer"),
]


@pytest.mark.parametrize(("cause", "key", "default", "other"), CASES, ids=lambda value: str(value))
def test_a_key_without_effect_must_keep_its_default(minimal, cause, key, default, other) -> None:
    (said,) = problems(minimal, cause, f"{key}={other}")
    assert said.startswith(f"{key} has no effect ")
    assert f" and must keep its default {default}, got " in said
    load_config(minimal, [cause, f"{key}={default}"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["pc={level: 2, gamma_lr: 0.1, gamma_weight_decay: 0.1, steps: 5, norm_recovery: false}"],
        ["model.init={spectral: false, std: 0.1, depth_scaled: true, depth_scaling: layer}"],
        # A feature that is disabled, for instance by an override, keeps its other settings.
        ["checkpoint={interval: 0, keep_last: 5}"],
    ],
    ids=str,
)
def test_a_key_with_an_effect_may_be_changed(minimal, overrides: list[str]) -> None:
    load_config(minimal, overrides)


def test_what_an_earlier_version_let_pass_can_still_be_read(minimal) -> None:
    """If such a config were rejected, checkpoints of the earlier version could neither be resumed
    nor exported."""
    config = load_config(minimal)
    minimal.write_text(to_yaml(config).replace("std: 0.02\n", "std: 0.03\n", 1))
    assert problems(minimal)[0].startswith("model.init.std has no effect ")
    assert load_saved_config(minimal).model.init.std == 0.03


def test_a_saved_config_with_a_key_of_another_version_is_refused(minimal) -> None:
    saved = yaml.safe_load(to_yaml(load_config(minimal)))
    saved["optimizer"]["rules"]["muon_sphere"]["power_iteration_steps"] = 10
    minimal.write_text(yaml.safe_dump(saved))
    with pytest.raises(InvalidConfigError, match="unknown key .*power_iteration_steps"):
        load_saved_config(minimal)


# --- places that are none, and settings without effect that are said -----------------------------

PATHS = (
    "run.dir",
    "data.tokenizer",
    "data.train.text.path",
    "data.validation.text.path",
    "checkpoint.initialize_from",
    "plan.device",
)


PLACES = [
    ("s3://bucket/x", "must be a local path"),
    ("gs://bucket/x", "must be a local path"),
    ("hf://datasets/a/b", "must be a local path"),
    ("hf:a/b", "must be a local path"),
    ("dbfs:/x", "must be a local path"),
    ("file:///x", "must be a local path"),
    ("$HOME/x", "must not start with ~ or contain \\$NAME, .*oc.env:HOME}' for the"),
    ("/data/$USER/x", "must not start with ~ or contain \\$NAME, .*oc.env:USER}' for the"),
    ("~/x", "must not start with ~ or contain \\$NAME, .*oc.env:HOME}' for the"),
    ("'~'", "must not start with ~ or contain \\$NAME, .*oc.env:HOME}' for the"),
]


@pytest.mark.parametrize(
    ("key", "path", "rule"),
    [("run.dir", *each) for each in PLACES] + [(key, *PLACES[0]) for key in PATHS[1:]],
)
def test_a_place_that_is_none_is_refused(minimal, key: str, path: str, rule: str) -> None:
    (said,) = problems(minimal, f"{key}={path}")
    assert said.startswith(key) and re.search(rule, said) and path in said


@pytest.mark.parametrize("path", ["runs/a:b", "C$/x", "runs/x~", "100$", "a b/c", "hf/x"])
def test_a_place_with_unusual_letters_is_a_place(minimal, path: str) -> None:
    assert load_config(minimal, [f"run.dir='{path}'"]).run.dir == path


MOE = "model={family: moe, moe: {experts: 4, top_k: 2, expert_ffn: 32}}"
UNUSED = {
    "": "schedule.cooldown_fraction=0.5 spikes.window=64 monitors.noise_samples=4 "
    "validation.interval=5 validation.samples=5 validation.samples_interval=5 "
    "validation.samples_tokens=5 tasks.interval=5 tasks.examples=5 log.wandb.project=mine",
    "data.mock=true": "validation.samples_tokens=5",
    "schedule.kind=constant": "schedule.min_ratio=0.2",
    "checkpoint.keep_last=null": "checkpoint.keep_every=10",
    "model={family: gpt, activation: relu2}": "optimizer.split_gate_up=false",
    "pc={}": "pc.polynomial.degree=5 pc.polynomial.cutoff=0.5 pc.polynomial.alpha=0.5 "
    "pc.polynomial.upper=1.5",
    "pc.spectral_norm=none": "pc.steps=5 pc.norm_recovery=false",
    "pc.learnable_gamma=false": "pc.gamma_lr=0.1 pc.gamma_weight_decay=0.2",
    f"{MOE[:-2]}, expert_bias: false}}}}": "model.moe.expert_bias_rate=0.1",
}
"""Maps overrides to settings that have no effect with them."""

USED = [
    "schedule={kind: wsd, cooldown_fraction: 0.5, min_ratio: 0.2}", "data.mock=true",
    "spikes={deviations: 5, window: 64}", "monitors={noise_samples: 4, groups: [noise]}",
    "validation={interval: 5, samples: 5, samples_interval: 5, samples_tokens: 5}",
    "tasks={files: {own: own.jsonl}, interval: 5, examples: 5}",
    "log={trackers: [wandb], wandb: {project: mine}}",
    "checkpoint={interval: 5, keep_last: 2, keep_every: 10}",
    "pc={steps: 5, norm_recovery: false, gamma_lr: 0.1, gamma_weight_decay: 0.2}",
    "pc.polynomial={kind: fitted, degree: 5, cutoff: 0.5, alpha: 0.5, upper: 1.5}",
    MOE, "model.moe.expert_bias_rate=0.1", "optimizer.split_gate_up=false",
]  # fmt: skip
"""Overrides with which all of these settings have an effect."""

OTHERS = {
    "optimizer.matrix.weight_decay = 0.1": ["optimizer.matrix.weight_decay=0.1"],
    "optimizer.roles.q.weight_decay = 0.2": ["optimizer.roles.q.weight_decay=0.2"],
    "optimizer.roles.o.weight_decay = 0.3": [
        "optimizer.matrix={rule: muon, weight_decay: 0.3}",
        "optimizer.roles.o.rule=muon_sphere",
    ],
    "monitors.interval = 101": ["monitors.interval=101"],
    "validation.samples_interval = 101": [
        "validation={samples_interval: 101, samples_tokens: 9}",
        "data.validation.v.path=v",
    ],
    "checkpoint.keep_every = 7 (first at step 105, with checkpoint.interval)": [
        "checkpoint={interval: 15, keep_every: 7}"
    ],
    "watchdog.replica_interval = 101": ["watchdog.replica_interval=101"],
    "spikes.deviations = 4.0": ["spikes={deviations: 4, window: 100}"],
    "watchdog.hang_seconds = 400": ["watchdog.hang_seconds=400"],
    "schedule.cooldown_fraction = 0.004": ["schedule={kind: wsd, cooldown_fraction: 0.004}"],
}
"""Maps other settings with no effect to overrides: weight decay that a retraction undoes, steps
after the end of the run, and a time above half of the timeout."""


def test_every_setting_without_effect_is_said(minimal) -> None:
    length = "train.sequence_length=64"
    settings = [(key, each) for key, text in UNUSED.items() for each in text.split()]
    for place, setting in settings:
        overrides = [*([place] if place else []), length, setting]
        (said,) = without_effect(load_config(minimal, overrides))
        key, _, value = setting.partition("=")
        assert re.match(rf"{re.escape(key)} = '?{value}'? has no effect with", said)
    config = load_config(minimal, [length, *USED])
    keys = {f"{place}.{key}" for place, keys, *_ in effects._unused(config) for key in keys}
    assert keys == {setting.partition("=")[0] for _, setting in settings}
    for key in keys:
        section, _, name = key.rpartition(".")
        part = attrgetter(section)(config)
        assert getattr(part, name) != getattr(type(part), name), key
    assert not [*without_effect(config)]


@pytest.mark.parametrize("setting", OTHERS)
def test_another_setting_without_effect_is_said(minimal, setting: str) -> None:
    (said,) = without_effect(load_config(minimal, OTHERS[setting]))
    assert re.match(f"{re.escape(setting)} has no effect (with|in a run of 100 steps)", said)


def test_settings_of_a_rule_have_an_effect_wherever_it_is_used(minimal) -> None:
    key = "optimizer.rules.normuon.momentum"
    assert [*settings_of_unused_rules(load_config(minimal, [f"{key}=0.7"]))] == [key]
    for place in ("matrix", "embedding", "head", "roles.o"):
        used = load_config(minimal, [f"{key}=0.7", f"optimizer.{place}.rule=normuon"])
        assert not [*settings_of_unused_rules(used)], place


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.matrix={rule: muon, weight_decay: 0.1}"],
        ["optimizer.embedding.weight_decay=0.1"],
        ["monitors={interval: 0, activation_gib: 1.0}"],
        ["monitors.interval=100", "checkpoint={interval: 20, keep_every: 50}"],
        ["monitors.interval=51", "train.exit_step=50"],
    ],
    ids=str,
)
def test_what_has_an_effect_is_not_said_to_have_none(minimal, overrides: list[str]) -> None:
    assert list(without_effect(load_config(minimal, overrides))) == []


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_recipes_have_no_setting_without_effect(recipe) -> None:
    assert list(without_effect(load_config(recipe))) == []
