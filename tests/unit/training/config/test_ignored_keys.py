"""Settings without effect are refused where a user changed them; defaults never are."""

from pathlib import Path

import pytest

from tests.minimal_config import problems
from tests.paths import ROOT
from training.config import load_config, load_saved_config, to_yaml

# For each: what leaves a key without effect, the key, its default, and another value.
CASES = [
    ("pc={}", "pc.polynomial.degree", 4, 6),
    ("pc={}", "pc.polynomial.cutoff", 0.3, 0.4),
    ("pc={}", "pc.polynomial.alpha", 4.0, 2.0),
    ("pc={}", "pc.polynomial.upper", 1.1, 1.2),
    ("pc.polynomial.kind=over_flattening", "pc.polynomial.degree", 4, 6),
    ("pc.polynomial.kind=over_flattening", "pc.level", "null", 2),
    ("pc.polynomial.kind=fitted", "pc.level", "null", 2),
    ("pc.learnable_gamma=false", "pc.gamma_weight_decay", "null", 0.1),
    ("pc.learnable_gamma=false", "pc.gamma_lr", "null", 0.1),
    ("pc.spectral_norm=none", "pc.steps", 10, 5),
    ("pc.spectral_norm=none", "pc.norm_recovery", "true", "false"),
    ("model.init.spectral=true", "model.init.std", 0.02, 0.03),
    ("model.init.spectral=true", "model.init.depth_scaled", "false", "true"),
    ("model.init.spectral=true", "model.init.depth_scaling", "'layers'", "layer"),
    ("model.init.spectral=false", "model.init.depth_scaling", "'layers'", "layer"),
    ("model.init.spectral=false", "model.init.radius", "'spectral_mup'", "spectral_kaiming"),
    ("model.init.spectral=false", "model.init.radius_scaler", 1.0, 2.0),
    ("optimizer.clip.max_norm=null", "optimizer.clip.matrix_roles", "true", "false"),
    ("optimizer.matrix.rule=adamw", "optimizer.clip.matrix_roles", "true", "false"),
    ("optimizer.matrix.rule=adamw", "optimizer.distributed.momentum_dtype", "null", "bf16"),
    ("schedule.kind=constant", "schedule.min_ratio", 0.1, 0.0),
    ("schedule.kind=cosine", "schedule.cooldown_fraction", 0.2, 0.1),
    ("checkpoint.keep_last=null", "checkpoint.keep_every", "null", 10),
    ("spikes.rewinds=1", "spikes.window", 128, 64),
    ("log.trackers=[tensorboard]", "log.wandb.project", "'spectrain'", "mine"),
    ("log.trackers=[]", "log.wandb.tags", "[]", "[a]"),
    ("monitors.groups=[weights]", "monitors.noise_samples", 8, 4),
    ("monitors.groups=[weights]", "monitors.activation_gib", 2.0, 1.0),
    ("seed=1", "validation.interval", 0, 10),
    ("seed=1", "validation.samples", "null", 10),
    ("seed=1", "optimizer.rules.muon_sphere.retraction_rate", 0.1, 0.2),
    ("seed=1", "optimizer.rules.spectral_sphere.retraction_rate", 0.1, 0.2),
    ("seed=1", "optimizer.rules.muon_plus_plus.tolerance", "null", 0.1),
    ("seed=1", "optimizer.rules.muon_plus_plus.max_evaluations", 1, 3),
    ("seed=1", "optimizer.rules.muon_plus_plus.correlation_threshold", 1.0, 2.0),
]


@pytest.mark.parametrize(("cause", "key", "default", "other"), CASES, ids=lambda value: str(value))
def test_a_key_without_effect_must_keep_its_default(
    minimal: Path, cause: str, key: str, default: object, other: object
) -> None:
    (said,) = problems(minimal, cause, f"{key}={other}")
    assert said.startswith(f"{key} must keep its default {default}, as it has no effect ")
    load_config(minimal, [cause, f"{key}={default}"])


IN_USE = [
    ["pc={polynomial: {kind: fitted, degree: 6, cutoff: 0.4, alpha: 2, upper: 1.2}}"],
    ["pc={level: 2, gamma_lr: 0.1, gamma_weight_decay: 0.1, steps: 5, norm_recovery: false}"],
    ["model.init={spectral: false, std: 0.1, depth_scaled: true, depth_scaling: layer}"],
    ["model.init={spectral: false, std: null}"],
    ["model.init={radius_scaler: 2, radius: align_adam_rms}"],
    ["optimizer.clip.matrix_roles=false", "optimizer.distributed.momentum_dtype=bf16"],
    ["schedule={kind: wsd, cooldown_fraction: 0.1, min_ratio: 0}"],
    ["checkpoint={keep_last: 1, keep_every: 5}", "spikes={deviations: 4, window: 16}"],
    ["log={trackers: [wandb], wandb: {project: mine, group: a, tags: [b]}}"],
    ["monitors={groups: [noise, activations], noise_samples: 4, activation_gib: 1}"],
    ["data.validation={a: {path: b}}", "validation={interval: 3, samples: 4}"],
    ["optimizer.rules.muon_sphere={retraction: dynamic, retraction_rate: 0.2}"],
    ["optimizer.rules.muon_plus_plus={algorithm: dual, tolerance: 0.1, max_evaluations: 3}"],
    [
        "optimizer.rules.muon_plus_plus.algorithm=project",
        "optimizer.rules.muon_plus_plus.correlation_rescale=true",
        "optimizer.rules.muon_plus_plus.correlation_threshold=2",
    ],
    # Switched off on purpose, as by an override: its other settings wait until it is on again.
    ["checkpoint={interval: 0, keep_last: 5}"],
    ["monitors={interval: 0, groups: [noise], noise_samples: 4}"],
]


@pytest.mark.parametrize("overrides", IN_USE, ids=str)
def test_a_key_with_an_effect_may_be_changed(minimal: Path, overrides: list[str]) -> None:
    load_config(minimal, overrides)


def test_gates_that_a_model_does_not_have_are_not_split() -> None:
    path = ROOT / "configs" / "tiny_gpt_muon.yaml"
    assert problems(path, "optimizer.split_gate_up=false") == [
        "optimizer.split_gate_up must keep its default true, as it has no effect with "
        "model.activation relu2, which has no gate, got false"
    ]


def test_experts_alone_have_nothing_to_recompute_selectively() -> None:
    path = ROOT / "configs" / "tiny_moe_sso.yaml"
    routed_only = ["model.moe.dense_layers=0", "model.moe.shared_experts=0"]
    (said,) = problems(path, *routed_only, "train.recompute=selective")
    assert said.startswith("train.recompute must be none or full for a model whose feed-forward")
    load_config(path, [*routed_only, "train.recompute=full"])
    load_config(path, ["train.recompute=selective"])
    (said,) = problems(path, "model.moe.expert_bias=false")
    assert said.startswith("model.moe.expert_bias_rate must keep its default 0.001, as")


def test_what_an_earlier_version_let_pass_can_still_be_read(minimal: Path) -> None:
    """Otherwise its checkpoints could be neither continued nor exported."""
    config = load_config(minimal)
    minimal.write_text(to_yaml(config).replace("window: 128", "window: 64"))
    assert problems(minimal)[0].startswith("spikes.window must keep its default 128")
    assert load_saved_config(minimal).spikes.window == 64
