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

HEADS, HEAD, HIDDEN, INNER, EXPERTS = 4, 8, 24, 40, 3
PLAIN: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=INNER, num_hidden_layers=2,
    num_attention_heads=HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FEW_KEYS = PLAIN | {"num_key_value_heads": 2}
DENSE = FEW_KEYS | {"hidden_size": HIDDEN, "head_dim": HEAD}
MIXTURE = DENSE | dict(
    num_experts=EXPERTS, num_local_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=20
)
LATENT = DENSE | dict(
    q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
    moe_intermediate_size=20, first_k_dense_replace=1, num_key_value_heads=HEADS, head_dim=4,
)  # fmt: skip
LINEAR = MIXTURE | dict(
    num_hidden_layers=4, shared_expert_intermediate_size=24, linear_num_value_heads=4,
    linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": HEADS, "n_layer": 2, "n_positions": 16}
T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=INNER, num_heads=HEADS, num_layers=2)
Wanted = dict[str, dict[tuple[int, ...], int] | None]
Q, KV, WIDE_Q = {(HEAD, HIDDEN): HEADS}, {(HEAD, HIDDEN): 2}, {(HEAD, 32): HEADS}
THREE = {(HEAD, 32): 3 * HEADS}
LLAMA: Wanted = {
    **{"q_proj": Q, "k_proj": KV, "v_proj": KV, "o_proj": {(HIDDEN, HEADS * HEAD): 1}},
    **{"gate_proj": {(INNER, HIDDEN): 1}, "up_proj": {(INNER, HIDDEN): 1}},
    **{"down_proj": {(HIDDEN, INNER): 1}},
}
HEADED = LLAMA | {"lm_head": None}
DEEPSEEK: Wanted = {
    "q_a_proj": {(16, HIDDEN): 1},
    "q_b_proj": {(12, 16): HEADS},
    "kv_a_proj_with_mqa": {(12, HIDDEN): 1, (4, HIDDEN): 1},  # the latent, and rotary keys
    "kv_b_proj": {(8, 12): HEADS, (6, 12): HEADS},
    "o_proj": {(HIDDEN, HEADS * 6): 1},
    "mlp.experts.gate_up_proj": {(20, HIDDEN): 2 * EXPERTS},
    "mlp.experts.down_proj": {(HIDDEN, 20): EXPERTS},
}


def of_experts(inner: int) -> Wanted:
    """Return matrices of a mixture of experts."""
    gated, down = {(inner, HIDDEN): 2 * EXPERTS}, {(HIDDEN, inner): EXPERTS}
    experts: Wanted = {"experts.gate_up_proj": gated, "experts.down_proj": down}
    return {"q_proj": Q, "mlp.gate": None, **experts}


MODELS: dict[str, tuple[dict[str, Any], Wanted]] = {
    "Llama": (DENSE, HEADED),
    "Mistral": (DENSE, HEADED),
    "Qwen2": (FEW_KEYS, {"q_proj": WIDE_Q, "k_proj": {(HEAD, 32): 2}, "o_proj": {(32, 32): 1}}),
    "Qwen3": (DENSE, HEADED),
    "Gemma": (DENSE, LLAMA),
    "Gemma2": (DENSE, LLAMA),
    "Phi3": (FEW_KEYS, {"qkv_proj": {(HEAD, 32): HEADS + 4}, "gate_up_proj": {(INNER, 32): 2}}),
    "GPTNeoX": (PLAIN, {"query_key_value": THREE, "dense_h_to_4h": {(INNER, 32): 1}}),
    "GPT2": (
        GPT2,
        {
            **{"c_attn": THREE, "attn.c_proj": {(32, 32): 1}},
            **{"c_fc": {(128, 32): 1}, "mlp.c_proj": {(32, 128): 1}},
        },
    ),
    "Mixtral": (MIXTURE, of_experts(INNER)),
    "Qwen3Moe": (MIXTURE, of_experts(20)),
    "DeepseekV3": (LATENT, DEEPSEEK),
    "DeepseekV2": (LATENT, DEEPSEEK),
}
"""Settings of a tiny model, with shapes and numbers of the matrices in its weights (None for
AdamW)."""
UNNAMED: dict[str, tuple[dict[str, Any], Wanted]] = {
    "Qwen3Next": (
        LINEAR,
        {
            "q_proj": {(8, HIDDEN): 8},  # a query and a gate for each head
            # Of 2 heads: query, key, 2 values, and the gate of both values.
            "in_proj_qkvz": {(8, HIDDEN): 8, (16, HIDDEN): 2},
            "linear_attn.conv1d": None,
            "experts.down_proj": {(HIDDEN, 20): EXPERTS},
        },
    ),
    "Bert": (
        PLAIN,
        {**dict.fromkeys(("query", "key", "value"), WIDE_Q), "intermediate.dense": {(40, 32): 1}},
    ),
    "T5": (T5, {**dict.fromkeys("qkv", WIDE_Q), "o": {(32, 32): 1}}),
    "ViT": (
        PLAIN | {"image_size": 16, "patch_size": 4},
        {"q_proj": WIDE_Q, "projection": {(32, 48): 1}},
    ),
    "Mamba": (
        PLAIN | {"state_size": 4},
        {
            **{"in_proj": {(40, 32): 2}, "x_proj": {(2, 40): 1, (4, 40): 2}},
            **{"conv1d": None, "A_log": None},
        },
    ),
    "GptOss": (
        MIXTURE,
        {"q_proj": Q, "experts.gate_up_proj": {(INNER, HIDDEN): 6}, "mlp.router": None},
    ),
    "Falcon": (
        PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"query_key_value": {(8, 32): 8}},
    ),
    "Bloom": (
        {"vocab_size": 64, "hidden_size": 32, "n_head": 4, "n_layer": 2},
        {"query_key_value": THREE},
    ),
    "Mpt": ({"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2}, {"Wqkv": THREE}),
    "ModernBert": (PLAIN, {"Wqkv": THREE, "Wi": {(40, 32): 2}}),
}
"""Models whose matrices only a forward pass detects."""
NAMED_ALONE = ("Mistral", "Qwen2", "Gemma", "Gemma2", "DeepseekV2")
"""Models like others under a forward pass."""
WATCHED = [name for name in (*MODELS, *UNNAMED) if name not in NAMED_ALONE]
FAST = ("Llama", "Phi3", "GPT2", "DeepseekV3", "Mixtral", "GptOss")
WITHOUT_SDPA = ("Bloom", "GptOss", "Mamba", "Mpt", "Qwen3Next", "T5")
KINDS = {
    "GPT2": "LMHeadModel",
    "Bert": "ForMaskedLM",
    "T5": "ForConditionalGeneration",
    "ViT": "ForImageClassification",
    "ModernBert": "ForMaskedLM",
}
APART = re.compile(r"embed|wte|wpe|lm_head|norm|ln_|bias|mlp\.gate\.weight")


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(MODELS | UNNAMED)[name][0], **options)
    kind = getattr(transformers, f"{name}{KINDS.get(name, 'ForCausalLM')}")
    model: nn.Module = kind(config).eval()
    return model


def matrices(split: ParameterSplit) -> Wanted:
    """Return shapes and numbers of the matrices of each parameter, None for AdamW."""
    found: Wanted = {}
    for group in split:
        division = Division.of(group.get("units"))
        for name, parameter in group["params"]:
            parts = (narrowed(parameter, box) for box in division.boxes(parameter.shape))
            shapes = Counter(tuple(division.matrix(part).shape) for part in parts)
            found[name] = None if "rule" in group else dict(shapes)
    return found


def check(name: str, split: ParameterSplit) -> Wanted:
    """Compare a model's matrices with the table, and return them."""
    found = matrices(split)
    for ending, wanted in (MODELS | UNNAMED)[name][1].items():
        own = [
            v for n, v in found.items() if f".{n}".removesuffix(".weight").endswith(f".{ending}")
        ]
        assert own, ending
        assert all(each == wanted for each in own), f"{ending}: {own[0]}"
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_of_known_models(name: str) -> None:
    model = build(name)
    split = split_parameters(model)
    found = check(name, split)
    assert sorted(n for n, _ in model.named_parameters()) == sorted(row.name for row in split.rows)
    assert {n for n, shapes in found.items() if shapes is None} == {*filter(APART.search, found)}
    whole = [n for n, shapes in found.items() if shapes is not None]
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
