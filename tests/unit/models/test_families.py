"""One table names the model families; other names are refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from models.blocks.compiled import fuse_blocks_
from models.families import FAMILIES
from models.huggingface.config_json import InexpressibleError, architecture
from models.layout import ChunkSpec
from parallel.comm.groups import Groups
from tests.tiny_families import tiny_model

MODEL = tiny_model("llama", layers=1)


def test_a_family_without_a_class_in_transformers_is_not_exported(monkeypatch) -> None:
    mine = replace(FAMILIES["llama"], name="mine", hugging_face=())
    monkeypatch.setitem(FAMILIES, "mine", mine)
    with pytest.raises(InexpressibleError, match="must have a class .*, got mine"):
        architecture(replace(MODEL, family="mine"))


def test_an_activation_without_a_compiled_form_is_refused(world: Groups) -> None:
    family = FAMILIES["llama"]
    config = family.code.transformer_config(MODEL, dtype=torch.float32)
    config.activation_func = F.mish
    chunk = family.code.build(MODEL, config, ChunkSpec((0,)), sequence_length=8)
    with pytest.raises(ValueError, match="activation must be one of .*, got mish with"):
        fuse_blocks_([chunk], "aot_eager")
