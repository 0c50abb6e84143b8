"""The shortest valid run config, and the problems reported for a changed one."""

from pathlib import Path

import pytest

from training.config import InvalidConfigError, check, load_config
from training.errors import InputError

MINIMAL = """
run: {name: minimal, dir: runs/minimal}
model: {layers: 4, hidden: 64, heads: 4, ffn: 96}
data: {train: {text: {path: data/text}}}
train: {steps: 100, global_batch: 8, micro_batch: 2, sequence_length: 32}
optimizer:
  matrix: {rule: spectral_sphere, lr: 5e-3}
  embedding: {rule: adamw, lr: 1e-3}
  head: {rule: adamw, lr: 1e-3}
  scalar: {rule: adamw, lr: 1e-3}
"""


def problems(path: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    """Return the problems reported for an invalid config."""
    with pytest.raises(InvalidConfigError) as caught:
        config = load_config(path, overrides)
        if world_size is not None:
            check(config, world_size)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert isinstance(caught.value, InputError)
    return caught.value.problems
