"""The detected matrices in models of transformers, against the rows of heads and gates.

test_watch_sweep.py changes matrices one by one, and must see one head change.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from spectral import split_parameters
from tests.slow_cases import slow_but

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PLAIN = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
MIXTURE = {
    **SIZES,
    "num_experts": 3,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
LINEAR = {
    **MIXTURE,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 24,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_head": 4, "n_layer": 2}
FALCON = {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}
MPT = {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2}
VIT = {**PLAIN, "image_size": 16, "patch_size": 4}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 4, "num_layers": 2}
Wanted = dict[str, tuple[int, tuple[int, int]] | None]
Q, KV = (4, (8, 32)), (2, (8, 32))
LLAMA: Wanted = {
    "q_proj": Q,
    "k_proj": KV,
    "v_proj": KV,
    "o_proj": (1, (32, 32)),
    "gate_proj": (1, (40, 32)),
    "down_proj": (1, (32, 40)),
    "lm_head": None,
}
EXPERTS: Wanted = {
    "q_proj": Q,
    "experts.gate_up_proj": (6, (20, 32)),
    "experts.down_proj": (3, (32, 20)),
    "mlp.gate": None,
}
MODELS: dict[str, tuple[dict[str, Any], str, Wanted]] = {
    "Llama": (SIZES, "ForCausalLM", LLAMA),
    "Qwen3": (SIZES, "ForCausalLM", LLAMA),
    "Mixtral": ({**MIXTURE, "intermediate_size": 20}, "ForCausalLM", EXPERTS),
    "Qwen3Moe": (MIXTURE, "ForCausalLM", EXPERTS),
    "Qwen3Next": (
        LINEAR,
        "ForCausalLM",
        {
            "q_proj": (8, (8, 32)),  # a query and a gate for each head
            "in_proj_qkvz": (10, (8, 32)),  # of 2 heads: query, key, 2 values and their gate
            "linear_attn.conv1d": None,
            "experts.down_proj": (3, (32, 20)),
        },
    ),
    "DeepseekV3": (
        LATENT,
        "ForCausalLM",
        {
            "q_a_proj": (1, (16, 32)),
            "q_b_proj": (4, (12, 16)),
            "kv_a_proj_with_mqa": (2, (12, 32)),  # the latent, and the keys of the rotary part
            "kv_b_proj": (8, (8, 12)),
            "experts.gate_up_proj": (6, (20, 32)),
        },
    ),
    "Phi3": (SIZES, "ForCausalLM", {"qkv_proj": (8, (8, 32)), "gate_up_proj": (2, (40, 32))}),
    "GPT2": (
        GPT2,
        "LMHeadModel",
        {"c_attn": (12, (8, 32)), "c_fc": (1, (128, 32)), "mlp.c_proj": (1, (32, 128))},
    ),
    "GPTNeoX": (PLAIN, "ForCausalLM", {"query_key_value": (12, (8, 32)), "lm_head": None}),
    "Bert": (
        PLAIN,
        "ForMaskedLM",
        {"query": Q, "key": Q, "value": Q, "intermediate.dense": (1, (40, 32))},
    ),
    "T5": (T5, "ForConditionalGeneration", {"q": Q, "k": Q, "v": Q, "o": (1, (32, 32))}),
    "ViT": (VIT, "ForImageClassification", {"q_proj": Q, "projection": (1, (32, 48))}),
    "Mamba": (
        {**PLAIN, "state_size": 4},
        "ForCausalLM",
        {"in_proj": (2, (40, 32)), "x_proj": (3, (2, 40)), "conv1d": None, "A_log": None},
    ),
    "GptOss": (
        MIXTURE,
        "ForCausalLM",
        {"q_proj": Q, "experts.gate_up_proj": (6, (40, 32)), "mlp.router": None},
    ),
    "Falcon": (FALCON, "ForCausalLM", {"query_key_value": (8, (8, 32))}),
    "Bloom": (BLOOM, "ForCausalLM", {"query_key_value": (12, (8, 32))}),
    "Mpt": (MPT, "ForCausalLM", {"Wqkv": (12, (8, 32))}),
    "ModernBert": (PLAIN, "ForMaskedLM", {"Wqkv": (12, (8, 32)), "Wi": (2, (40, 32))}),
}
FAST = ("Llama", "Phi3", "GPT2", "DeepseekV3", "Mixtral", "GptOss")
WITHOUT_SDPA = ("Bloom", "GptOss", "Mamba", "Mpt", "Qwen3Next", "T5")


def build(name: str, attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    settings, kind, _ = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**settings, attn_implementation=attention)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config).eval()
    ids = torch.randint(3, 64, (2, 9))
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "ViT" else {"input_ids": ids}
    if name == "T5":
        inputs["decoder_input_ids"] = ids
    return model, inputs


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
def test_the_matrices_of_models(name: str, attention: str) -> None:
    if attention == "sdpa" and name in WITHOUT_SDPA:
        pytest.skip(f"{name} has no sdpa")
    model, inputs = build(name, attention)
    rows = split_parameters(model, example=inputs).rows
    for ending, wanted in MODELS[name][2].items():
        own = [
            r
            for r in rows
            if r.name.removesuffix(".weight").endswith(f".{ending}") or r.name == f"{ending}.weight"
        ]
        assert own, ending
        for row in own:
            found = (row.matrices, row.matrix) if row.rule == "spectral" else None
            assert found == wanted, str(row)
