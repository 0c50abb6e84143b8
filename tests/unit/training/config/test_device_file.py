"""Files that describe the planned GPU are read as configs are: all problems at once."""

from pathlib import Path

import pytest

from parallel.plan.devices import DEVICES
from training.config import InvalidConfigError
from training.config.device_file import device_named


def described(folder: Path, text: str) -> str:
    """The file of a device."""
    (folder / "device.yaml").write_text(text)
    return str(folder / "device.yaml")


def test_a_file_replaces_figures_of_its_base(tmp_path: Path) -> None:
    file = described(tmp_path, "{base: a100, memory_bytes: 1000, peak: {bf16: 1.0e+12}}")
    device, base = device_named(file), DEVICES["a100"]
    assert (device.memory_bytes, device.copy_rate) == (1000, base.copy_rate)
    assert device.peak == base.peak | {"bf16": 1e12}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("{memory_byte: 3}", ["unknown key memory_byte; did you mean memory_bytes?"]),
        (
            "{memory_bytes: much, copy_rate: 0}",
            ["memory_bytes must be an integer, got 'much'", "copy_rate must be above 0, got 0"],
        ),
        ("{peak: {int4: 1.0e+15}}", ["peak must have keys among fp8, bf16, tf32, fp32, fp64"]),
        ("{base: h900}", ["h900"]),
        ("- 3", ["device.yaml"]),
    ],
)
def test_all_problems_of_a_file_are_named(text: str, problems: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as error:
        device_named(described(tmp_path, text))
    for problem in problems:
        assert problem in str(error.value)


def test_an_unknown_name_has_a_hint() -> None:
    with pytest.raises(InvalidConfigError, match="got 'h10'; did you mean h100"):
        device_named("h10")
