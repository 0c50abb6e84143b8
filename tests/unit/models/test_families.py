"""A single table lists the model families. Exports have the same tensors as transformers'
classes."""

from dataclasses import replace
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from models.blocks.compiled import fuse_blocks_
from models.families import FAMILIES
from models.huggingface.architectures import InexpressibleError
from models.huggingface.config_json import architecture, config_json
from models.huggingface.tensors import their_tensors
from models.layout import ChunkSpec
from parallel.comm.groups import Groups
from tests.tiny_families import MIXTURE, tiny_model

MODEL = tiny_model("llama", layers=1)
SOFTMAX = MIXTURE | {"shared_experts": 0, "score": "softmax", "expert_bias": False}


def test_a_family_without_a_class_in_transformers_is_not_exported(monkeypatch) -> None:
    mine = replace(FAMILIES["llama"], name="mine", hugging_face=())
    monkeypatch.setitem(FAMILIES, "mine", mine)
    with pytest.raises(InexpressibleError, match="be a family with a class .*, got mine"):
        architecture(replace(MODEL, family="mine"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_embeddings": True}),
        ("llama", {"attention_bias": "all", "vocab_multiple": 1}),
        ("llama", {"attention_bias": "qkv", "head_dim": None}),
        ("qwen3", {}),
        ("gemma2", {}),
    ],
)
def test_the_tensors_are_those_of_transformers_and_cover_ours(family, changes) -> None:
    """The import tests compare the values, also those of experts, which transformers 5 fuses."""
    model = tiny_model(family, **changes)
    settings = config_json(model, dtype="float32", positions=32, end_token=0)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    found = {each.name: each.shape for each in their_tensors(model)}
    assert found == {name: tuple(value.shape) for name, value in theirs.named_parameters()}
    for name, group in groupby(their_tensors(model), key=lambda each: each.parameter):
        parts = list(group)
        times = torch.zeros(parts[0].view_shape)
        for part in parts:
            part.put(times, part.take(times) + 1)
        rows = model.vocab_size if name in ("embedding", "head") else len(times)
        assert times[:rows].eq(1).all() and not times[rows:].any(), name


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt", {"activation": "relu2"},
         "activation must be swiglu or geglu for Llama, got 'relu2'"),
        ("llama", {"heads": 6}, "hidden must be divisible by heads = 6 for Llama, got 32"),
        # Qwen2's class has these biases, but no other head dimensions.
        ("llama", {"attention_bias": "qkv"},
         "attention_bias must be none or all for Llama, got 'qkv'"),
        ("moe", {"moe": MIXTURE | {"shared_gate": True}},
         "moe.shared_gate must be false for Glm4Moe, got true"),
        ("moe", {"moe": SOFTMAX | {"routed_scale": 2.5}},
         "moe.routed_scale must be 1 for Qwen3Moe, got 2.5"),
        ("moe", {"moe": SOFTMAX | {"expert_groups": 2}},
         "moe.expert_groups must be 1 for Qwen3Moe, got 2"),
    ],
)  # fmt: skip
def test_what_hugging_face_cannot_express_is_named(family, changes, reason) -> None:
    with pytest.raises(InexpressibleError) as caught:
        architecture(tiny_model(family, **changes))
    assert str(caught.value).replace("ForCausalLM", "") == f"model.{reason}"


def test_an_activation_without_a_compiled_form_is_refused(world: Groups) -> None:
    family = FAMILIES["llama"]
    config = family.code.transformer_config(MODEL, dtype=torch.float32)
    config.activation_func = F.mish
    chunk = family.code.build(MODEL, config, ChunkSpec((0,)), sequence_length=8)
    with pytest.raises(ValueError, match="one of the activations .*, got mish with"):
        fuse_blocks_([chunk], "aot_eager")
