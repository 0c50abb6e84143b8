"""The matrices in models of transformers, by names and by one forward pass, against the rows of
heads, gates and experts.

test_watch_sweep.py changes matrices one by one, and must see one head change.
"""

import re
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from spectral import ParameterSplit, split_parameters
from spectral.division import Division, narrowed
from tests.slow_cases import slow_but

PLAIN: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FEW_KEYS = PLAIN | {"num_key_value_heads": 2}
DENSE = FEW_KEYS | {"hidden_size": 24, "head_dim": 8}
MIXTURE = DENSE | dict(
    num_experts=3, num_local_experts=3, num_experts_per_tok=2, moe_intermediate_size=20
)
LATENT = DENSE | dict(
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=3,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    moe_intermediate_size=20,
    first_k_dense_replace=1,
    num_key_value_heads=4,
    head_dim=4,
)
LINEAR = MIXTURE | dict(
    num_hidden_layers=4, shared_expert_intermediate_size=24, linear_num_value_heads=4,
    linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16}
T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=40, num_heads=4, num_layers=2)
LLAMA = "q_proj 8x24*4, k_proj 8x24*2, v_proj 8x24*2, o_proj 24x32"
LLAMA += ", gate_proj 40x24, up_proj 40x24, down_proj 24x40"
DEEPSEEK = "q_a_proj 16x24, q_b_proj 12x16*4, kv_b_proj 8x12*4 6x12*4, o_proj 24x24"
DEEPSEEK += ", kv_a_proj_with_mqa 12x24 4x24"  # the latent, and rotary keys
DEEPSEEK += ", mlp.experts.gate_up_proj 20x24*6, mlp.experts.down_proj 24x20*3"
MIXTRAL = "q_proj 8x24*4, mlp.gate -, experts.gate_up_proj 40x24*6, experts.down_proj 24x40*3"
QWEN3 = "q_proj 8x24*4, mlp.gate -, experts.gate_up_proj 20x24*6, experts.down_proj 24x20*3"
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": (DENSE, f"{LLAMA}, lm_head -"),
    "Mistral": (DENSE, f"{LLAMA}, lm_head -"),
    "Qwen2": (FEW_KEYS, "q_proj 8x32*4, k_proj 8x32*2, o_proj 32x32"),
    "Qwen3": (DENSE, f"{LLAMA}, lm_head -"),
    "Gemma": (DENSE, LLAMA),
    "Gemma2": (DENSE, LLAMA),
    "Phi3": (FEW_KEYS, "qkv_proj 8x32*8, gate_up_proj 40x32*2"),
    "GPTNeoX": (PLAIN, "query_key_value 8x32*12, dense_h_to_4h 40x32"),
    "GPT2": (GPT2, "c_attn 8x32*12, attn.c_proj 32x32, c_fc 128x32, mlp.c_proj 32x128"),
    "Mixtral": (MIXTURE, MIXTRAL),
    "Qwen3Moe": (MIXTURE, QWEN3),
    "DeepseekV3": (LATENT, DEEPSEEK),
    "DeepseekV2": (LATENT, DEEPSEEK),
}
"""Settings of a tiny model, and the shapes and numbers of the matrices in its weights, with "-" for
AdamW."""
NEXT = "q_proj 8x24*8"  # a query and a gate for each head
NEXT += ", in_proj_qkvz 8x24*8 16x24*2"  # of 2 heads: query, key, 2 values, the gate of both values
NEXT += ", linear_attn.conv1d -, experts.down_proj 24x20*3"
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_head": 4, "n_layer": 2}
FALCON = PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2}
MAMBA = "in_proj 40x32*2, x_proj 2x40 4x40*2, conv1d -, A_log -"
UNNAMED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3Next": (LINEAR, NEXT),
    "Bert": (PLAIN, "query 8x32*4, key 8x32*4, value 8x32*4, intermediate.dense 40x32"),
    "T5": (T5, "q 8x32*4, k 8x32*4, v 8x32*4, o 32x32"),
    "ViT": (PLAIN | {"image_size": 16, "patch_size": 4}, "q_proj 8x32*4, projection 32x48"),
    "Mamba": (PLAIN | {"state_size": 4}, MAMBA),
    "GptOss": (MIXTURE, "q_proj 8x24*4, experts.gate_up_proj 40x24*6, mlp.router -"),
    "Falcon": (FALCON, "query_key_value 8x32*8"),
    "Bloom": (BLOOM, "query_key_value 8x32*12"),
    "Mpt": ({"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2}, "Wqkv 8x32*12"),
    "ModernBert": (PLAIN, "Wqkv 8x32*12, Wi 40x32*2"),
}
"""Models whose matrices are only detected by a forward pass."""
NAMED_ALONE = ("Mistral", "Qwen2", "Gemma", "Gemma2", "DeepseekV2")
"""Models that are only tested by names, because a forward pass treats them like other models."""
WATCHED = [name for name in (*MODELS, *UNNAMED) if name not in NAMED_ALONE]
FAST = ("Llama", "Phi3", "GPT2", "DeepseekV3", "Mixtral", "GptOss")
WITHOUT_SDPA = ("Bloom", "GptOss", "Mamba", "Mpt", "Qwen3Next", "T5")
KINDS = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "ModernBert": "ForMaskedLM"}
KINDS |= {"T5": "ForConditionalGeneration", "ViT": "ForImageClassification"}
APART = re.compile(r"embed|wte|wpe|lm_head|norm|ln_|bias|mlp\.gate\.weight")


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(MODELS | UNNAMED)[name][0], **options)
    kind = getattr(transformers, f"{name}{KINDS.get(name, 'ForCausalLM')}")
    model: nn.Module = kind(config).eval()
    return model


def matrices(split: ParameterSplit) -> dict[str, list[str]]:
    """Return the shapes and numbers of the matrices in each parameter, with "-" for AdamW."""
    found = {}
    for group in split:
        division = Division.of(group.get("units"))
        for name, parameter in group["params"]:
            parts = (narrowed(parameter, box) for box in division.boxes(parameter.shape))
            shapes = Counter("x".join(map(str, division.matrix(part).shape)) for part in parts)
            counted = [f"{shape}*{n}" if n > 1 else shape for shape, n in shapes.items()]
            found[name] = ["-"] if "rule" in group else sorted(counted)
    return found


def check(name: str, split: ParameterSplit) -> dict[str, list[str]]:
    """Compare the matrices of a model with the table, and return them."""
    found = matrices(split)
    for ending, *wanted in map(str.split, (MODELS | UNNAMED)[name][1].split(", ")):
        own = [
            v for n, v in found.items() if f".{n}".removesuffix(".weight").endswith(f".{ending}")
        ]
        assert own, ending
        assert all(each == sorted(wanted) for each in own), f"{ending}: {own[0]}"
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_of_known_models(name: str) -> None:
    model = build(name)
    split = split_parameters(model)
    found = check(name, split)
    assert sorted(n for n, _ in model.named_parameters()) == sorted(row.name for row in split.rows)
    assert {n for n, shapes in found.items() if shapes == ["-"]} == {*filter(APART.search, found)}
    whole = [n for n, shapes in found.items() if shapes != ["-"]]
    assert [sum(p is q for p in split.matrices) for q in split.matrices] == [1] * len(whole)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", slow_but(FAST, WATCHED))
def test_the_matrices_that_a_forward_pass_detects(name: str, attention: str) -> None:
    if attention == "sdpa" and name in WITHOUT_SDPA:
        pytest.skip(f"{name} has no sdpa")
    model = build(name, attn_implementation=attention)
    ids: Tensor = torch.randint(3, 64, (2, 9))
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "ViT" else {"input_ids": ids}
    if name == "T5":
        inputs["decoder_input_ids"] = ids
    check(name, split_parameters(model, example=inputs))
