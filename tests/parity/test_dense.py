"""The dense families against the models of the transformers library, on the same weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from models.config import ModelConfig
from models.units import Unit
from tests.parity.comparison import compare

SHAPE = {"layers": 2, "hidden": 48, "ffn": 80, "vocab_size": 128, "rope_base": 500.0}
LLAMA = ModelConfig(**SHAPE, heads=6, kv_heads=2)
MULTI_HEAD = ModelConfig(**SHAPE, heads=6)
QWEN3 = ModelConfig(
    family="qwen3", **SHAPE, heads=4, kv_heads=2, head_dim=16, qk_norm=True, norm_epsilon=1e-6
)

# (name, rows) of the reference's parameter that holds a unit; the rows of one head are a slice.
PROJECTIONS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
MATRICES = {
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GAINS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def place_in_reference(unit: Unit) -> tuple[str, slice]:
    """The reference's parameter that holds `unit`, and its rows there."""
    if unit.name in OUTSIDE:
        return f"{OUTSIDE[unit.name]}.weight", slice(None)
    _, layer, rest = unit.name.split(".", 2)
    if unit.role in PROJECTIONS:
        head = int(rest.split(".")[1])
        rows = slice(head * unit.shape[0], (head + 1) * unit.shape[0])
        return f"model.layers.{layer}.{PROJECTIONS[unit.role]}.weight", rows
    return f"model.layers.{layer}.{ {**MATRICES, **GAINS}[rest] }.weight", slice(None)


def reference(model: ModelConfig) -> torch.nn.Module:
    """The transformers model of the same shape, float32."""
    shape = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": False,
    }
    if model.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


@pytest.mark.parametrize("model", [LLAMA, MULTI_HEAD, QWEN3], ids=["llama", "mha", "qwen3"])
def test_logits_and_gradients_are_those_of_transformers(model: ModelConfig, world: object) -> None:
    compare(model, reference(model), place_in_reference)
