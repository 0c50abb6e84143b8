"""Checkpoints from several layouts are exported to Hugging Face models with the same losses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from scripts.convert_hf import main
from tests.distributed.export_workers import LENGTH, VOCABULARY
from tests.export_cases import DEEPSEEK, GEMMA2, MOE, QWEN3
from tests.launch import run_on_ranks
from tests.models import tokens_of
from tests.slow_cases import slow_but

TENSOR, PIPELINE = {"parallel__tensor": 2}, {"parallel__pipeline": 2}
EXPERT = {"parallel__expert": 2}
PC = {"pc__level": 4}
GROUPS = {"model__moe__expert_groups": 2, "model__moe__expert_bias": False}
BIASED = {"model__moe__expert_bias_rate": 1.0}
"""Makes expert biases so large that they affect the choice of experts more than the scores do."""
EXACT = {"model__vocab_multiple": 8}
IN_GRAPH = {"pc__level": 2, "pc__evaluator": "in_graph", "pc__blocks": "[q, o, up, down]"}
PADDED = "llama tensor"
CASES: dict[str, dict[str, Any]] = {
    PADDED: TENSOR,
    "llama pipeline pc": {**PIPELINE, **PC, "pc__learnable_gamma": False},
    "gpt tensor": {**TENSOR, "model__family": "gpt", "optimizer__split_gate_up": False},
    "qwen3 tensor pc in graph": {**TENSOR, **QWEN3, **IN_GRAPH},
    "gemma2 tensor": {**TENSOR, **GEMMA2},
    "deepseek expert pc": {
        **EXPERT,
        **DEEPSEEK,
        **BIASED,
        "pc__blocks": "[o, expert_gate, expert_down]",
    },
    "moe tensor groups": {**TENSOR, **MOE, **GROUPS, "model__qk_norm": True},
}


QUICK = (PADDED, "llama pipeline pc", "qwen3 tensor pc in graph", "deepseek expert pc")


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_transformers_computes_what_was_trained(name: str, folder: str) -> None:
    keys = CASES[name] | ({} if name == PADDED else EXACT)
    arguments = {"folder": folder, "keys": keys}
    losses, _ = run_on_ranks(2, "tests.distributed.export_workers", "saved_run", arguments)
    target = f"{folder}/out"
    # Exporting compares logits with our model's, to 1e-4 (huggingface/equivalence.py).
    assert main(["export", f"{folder}/saved", target, "--no-tokenizer"]) == 0
    theirs, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values())
    tokens, labels = tokens_of(4, LENGTH, VOCABULARY)
    with torch.no_grad():
        logits = theirs(tokens).logits
    assert logits.shape[-1] == VOCABULARY
    if name != PADDED:  # with padding rows of the head, which the training loss includes
        found = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        # Only the order of sums differs; losses are about 5.
        assert (found - losses).abs().max() < 1e-4
