"""Files that describe the planned GPU are read like configs, and all problems are reported at
once."""

import json

import pytest

from parallel.plan.devices import DEVICES
from tests.paths import ROOT
from training.config import InvalidConfigError, load_config
from training.dry_run import device_named, step_shape
from training.errors import ConfigError


def described(folder, text: str) -> str:
    """Write a device file, and return its path."""
    (folder / "device.yaml").write_text(text)
    return str(folder / "device.yaml")


def test_a_file_replaces_figures_of_its_base(tmp_path) -> None:
    file = described(tmp_path, "{base: a100, memory_bytes: 1000, peak: {bf16: 1.0e+12}}")
    device, base = device_named(file), DEVICES["a100"]
    assert (device.memory_bytes, device.copy_rate) == (1000, base.copy_rate)
    assert device.peak == base.peak | {"bf16": 1e12}
    assert device.name == "device"  # not the name of the base


def test_the_name_says_which_figures_are_assumed(tmp_path) -> None:
    device = device_named(described(tmp_path, "{name: My GPU, memory_bytes: 1000}"))
    assert device.name == "My GPU (remaining values from h100)"
    whole = {key: value for key, value in vars(DEVICES["a100"]).items()}
    assert device_named(described(tmp_path, json.dumps(whole))) == DEVICES["a100"]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("{memory_byte: 3}", ["unknown key memory_byte; did you mean memory_bytes?"]),
        (
            "{memory_bytes: much, copy_rate: 0}",
            ["memory_bytes must be an integer, got 'much'", "copy_rate must be above 0, got 0"],
        ),
        (
            "{peak: {int4: 1.0e+15}}",
            ["peak must have the keys bf16, tf32", "may have the key fp8, got fp8"],
        ),
        ("{peak: {replace: true, bf16: 1.0e+15}}", ["fp64, and may have the key fp8, got bf16"]),
        ("{base: h900}", ["base must be one of h100", "got 'h900'"]),
        ("{base: device.yaml}", ["base must be one of h100"]),
        ("- 3", ["device.yaml"]),
    ],
)
def test_all_problems_of_a_file_are_named(text: str, problems: list[str], tmp_path) -> None:
    with pytest.raises(InvalidConfigError) as error:
        device_named(described(tmp_path, text))
    for problem in problems:
        assert problem in str(error.value)


def test_a_plan_in_fp8_needs_a_device_with_such_products() -> None:
    keys = ["train.fp8=hybrid", "model.attention_backend=transformer_engine"]
    config = load_config(ROOT / "configs/llama1b_muon.yaml", [*keys, "model.vocab_size=4096"])
    assert step_shape(config, 8, DEVICES["h100"]).operands == "fp8"
    with pytest.raises(ConfigError, match=r"train\.fp8 must be null on NVIDIA A100"):
        step_shape(config, 8, DEVICES["a100"])


def test_an_unknown_name_has_a_hint() -> None:
    with pytest.raises(InvalidConfigError, match="got 'h10'; did you mean h100"):
        device_named("h10")
