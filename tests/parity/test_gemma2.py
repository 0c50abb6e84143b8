"""The family gemma2 against transformers' Gemma2ForCausalLM, on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from models.config import ModelConfig
from tests.parity.comparison import compare

GEMMA2 = ModelConfig(
    family="gemma2",
    layers=3,
    hidden=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=80,
    activation="geglu",
    vocab_size=120,
    rope_base=500.0,
    norm_epsilon=1e-6,
    query_pre_attn_scalar=10,
    # Of the size of what they cap, so that they matter.
    attention_softcap=2.0,
    final_softcap=1.5,
    sliding_window=7,
)
MODELS = {
    "everything": GEMMA2,
    "no windows": replace(GEMMA2, sliding_window=None),
    "no caps": replace(GEMMA2, attention_softcap=None, final_softcap=None),
    "neither": replace(
        GEMMA2, sliding_window=None, attention_softcap=None, query_pre_attn_scalar=None
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, world: object, tmp_path: Path
) -> None:
    compare(MODELS[name], tmp_path)
