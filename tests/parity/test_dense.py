"""The dense families against the models of the transformers library, on the same weights."""

from pathlib import Path

import pytest

from models.config import ModelConfig
from tests.parity.comparison import compare

SHAPE = {"layers": 2, "hidden": 48, "ffn": 80, "vocab_size": 120, "rope_base": 500.0}
MODELS = {
    "llama": ModelConfig(**SHAPE, heads=6, kv_heads=2),
    "mha": ModelConfig(**SHAPE, heads=6),
    "gpt with a gate": ModelConfig(family="gpt", **SHAPE, heads=4),
    "gpt with geglu": ModelConfig(family="gpt", **SHAPE, heads=4, activation="geglu"),
    "qwen3": ModelConfig(
        family="qwen3", **SHAPE, heads=4, kv_heads=2, head_dim=16, qk_norm=True, norm_epsilon=1e-6
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, world: object, tmp_path: Path
) -> None:
    compare(MODELS[name], tmp_path)
