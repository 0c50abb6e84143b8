"""Scaled rotary embeddings equal those of transformers, for the settings of published models."""

import json
from dataclasses import replace
from math import log, pi

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.blocks.rotary import RotaryEmbedding
from models.config import ModelConfig, RopeScalingConfig
from models.huggingface.architectures import rope_parameters
from models.huggingface.config_json import config_json, differences, model_section, model_settings

LENGTH = "original_max_position_embeddings"
BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 8192}
PUBLISHED = {
    "Llama 3.1 8B": (128, 5e5, {"kind": "llama3", "factor": 8.0, **BOUNDS}),
    "Llama 3.2 1B": (64, 5e5, {"kind": "llama3", "factor": 32.0, **BOUNDS}),
    "Qwen2.5 7B at 128k": (128, 1e6, {"kind": "yarn", "factor": 4.0, LENGTH: 32768}),
    "gpt-oss": (64, 1.5e5, {"kind": "yarn", "factor": 32.0, LENGTH: 4096, "truncate": False}),
    "scores as they are": (
        64,
        1e4,
        {"kind": "yarn", "factor": 40.0, LENGTH: 4096, "attention_factor": 1.0, "beta_fast": 9.0},
    ),
    "linear": (64, 1e4, {"kind": "linear", "factor": 3.0}),
}


def model_of(name: str) -> ModelConfig:
    """Return a model with the rotary embeddings of a published model."""
    size, base, scaling = PUBLISHED[name]
    return ModelConfig(
        layers=1, hidden=4 * size, heads=4, ffn=8, vocab_size=9, rope_base=base,
        rope_scaling=RopeScalingConfig(**scaling),
    )  # fmt: skip


def in_float64(name: str) -> tuple[torch.Tensor, float]:
    """Compute the frequencies and the scale from the definitions in the papers, one wavelength at a
    time."""
    size, base, scaling = PUBLISHED[name]
    factor, length = scaling["factor"], scaling.get(LENGTH, 0)
    found, scale = [], 1.0
    for i in range(size // 2):
        plain = base ** (-2 * i / size)
        turns = length * plain / (2 * pi)
        if scaling["kind"] == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        elif scaling["kind"] == "yarn":
            fast = scaling.get("beta_fast", 32.0)
            ends = [size * log(length / (b * 2 * pi)) / (2 * log(base)) for b in (fast, 1.0)]
            if scaling.get("truncate", True):
                ends = [ends[0] // 1, -(-ends[1] // 1)]
            kept = 1 - min(1.0, max(0.0, (i - ends[0]) / (ends[1] - ends[0])))
            scale = scaling.get("attention_factor", 0.1 * log(factor) + 1)
        else:
            kept = 0.0
        found.append(plain * kept + plain / factor * (1 - kept))
    return torch.tensor(found, dtype=torch.float64), scale


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_the_papers_and_of_transformers(name, world, tmp_path) -> None:
    model = model_of(name)
    ours = RotaryEmbedding(
        model.head_size,
        rotary_percent=1.0,
        rotary_base=model.rope_base,
        scaling=model.rope_scaling,
        use_cpu_initialization=True,
    )
    expected, scale = in_float64(name)
    # float32: powers of the base and the two products of a mean round to a few units.
    torch.testing.assert_close(ours.inv_freq.double(), expected, rtol=1e-6, atol=0)
    settings = config_json(model, dtype="float32", positions=16, end_token=None)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    theirs = AutoConfig.from_pretrained(tmp_path)
    kind = model.rope_scaling.kind
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    torch.testing.assert_close(ours.inv_freq, frequencies, rtol=3e-7, atol=0)
    assert ours.scale == pytest.approx(factor, rel=1e-12) == pytest.approx(scale, rel=1e-12)
    cos, rest, _, sin = ours(5)[:, 0, 0].double().chunk(4, -1)
    angles = torch.arange(5.0)[:, None] * expected
    # Tolerance of angles of a few turns in float32.
    torch.testing.assert_close(cos, scale * angles.cos(), rtol=0, atol=2e-6)
    torch.testing.assert_close(sin, scale * angles.sin(), rtol=0, atol=2e-6)
    assert torch.equal(cos, rest)
    # And back.
    section = model_section({**settings, "rope_parameters": theirs.rope_parameters})
    assert RopeScalingConfig(**section["rope_scaling"]) == model.rope_scaling
    assert differences(model_settings(model), theirs.to_dict() | {"hidden_act": "silu"}) == []


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "type"])
def test_every_version_of_config_json_is_read(form, tmp_path) -> None:
    model = model_of("Llama 3.2 1B")
    rope = rope_parameters(model)
    settings = config_json(model, dtype="float32", positions=16, end_token=None)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    del settings["rope_theta"], settings["rope_parameters"], settings["rope_scaling"]
    settings |= {
        "rope_parameters": {"rope_parameters": {**rope, "rope_theta": theta, "rope_type": kind}},
        "rope_scaling": {"rope_theta": theta, "rope_scaling": {**rope, "rope_type": kind}},
        "type": {"rope_theta": theta, "rope_scaling": {**rope, "type": kind}},
    }[form]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    section = model_section(theirs)
    assert section["rope_base"] == 5e5
    assert RopeScalingConfig(**section["rope_scaling"]) == model.rope_scaling
    assert differences(model_settings(model), theirs) == []


def test_what_is_scaled_in_another_way_is_another_model() -> None:
    model = model_of("Qwen2.5 7B at 128k")
    wanted = model_settings(model)

    def changed(**values: object) -> list[str]:
        theirs = {**wanted, "rope_parameters": {**wanted["rope_parameters"], **values}}
        return differences(wanted, theirs)

    assert changed() == changed(attention_factor=0.1 * log(4) + 1) == []
    assert "factor must be 4.0 to match the config's model, got 8.0" in changed(factor=8.0)
    assert changed(beta_fast=16.0) == [
        "beta_fast must be 32.0 to match the config's model, got 16.0"
    ]
    [line] = changed(mscale=1.0, mscale_all_dim=0.5)
    assert "attention_factor" in line and "got 1.06" in line
    # As in transformers, an attention factor takes precedence over both.
    [line] = changed(mscale=1.0, mscale_all_dim=0.5, attention_factor=1.25)
    assert "attention_factor" in line and "got 1.25" in line
    plain = replace(model, rope_scaling=None)
    [line] = differences(model_settings(plain), wanted)[:1]
    assert line == "rope_type must be 'default' to match the config's model, got 'yarn'"
    for kind in ("longrope", "dynamic", "proportional"):
        [line] = changed(rope_type=kind)
        assert line == f"rope_type must be one of default, linear, llama3, yarn, got '{kind}'"
    [line] = changed(rope_type="llama3")
    keys = "low_freq_factor, high_freq_factor"
    assert line == f"rope_type llama3 requires positive numbers for {keys}"
    for key in ("factor", "beta_fast", "attention_factor", "mscale"):
        [line] = changed(**{key: "4"})
        assert line == f"rope_type yarn requires positive numbers for {key}"
    assert changed(mscale=0, mscale_all_dim=1.0, beta_slow=None) == []


def test_exports_state_the_length_that_positions_are_made_for() -> None:
    wanted = {"Llama 3.1 8B": 131_072, "Llama 3.2 1B": 131_072, "Qwen2.5 7B at 128k": 131_072}
    for name, length in {**wanted, "linear": 16}.items():
        settings = config_json(model_of(name), dtype="float32", positions=16, end_token=None)
        assert settings["max_position_embeddings"] == length
        assert "rope_theta" not in settings["rope_scaling"]
