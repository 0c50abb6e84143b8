"""Gemma 2: a decoder with norms before and after attention and the feed-forward block.

Attention scores and logits can be soft-capped, and every other layer can use a sliding window. The
gemma2 record in models/families.py enables zero-centered gains and the scaled embedding. Source:
"Gemma 2: Improving Open Language Models at a Practical Size".
"""

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from models import dense
from models.blocks.norm import NormedRowParallelLinear, RMSNorm
from models.blocks.softcapped_attention import SoftcappedCoreAttention
from models.config import ModelConfig
from models.layout import ChunkSpec

transformer_config = dense.transformer_config
parameter_names = dense.parameter_names


def build(
    model: ModelConfig, config: TransformerConfig, chunk: ChunkSpec, **options: Any
) -> GPTModel:
    """Build the Megatron model for a chunk; see `models.dense.build`."""
    specs = []
    for layer in chunk.layers:
        core: Any = None
        if model.explicit_scores:
            core = partial(
                SoftcappedCoreAttention, softcap=model.attention_softcap, window=model.window(layer)
            )
        specs.append(
            dense.layer_spec(model, core_attention=core, row_linear=NormedRowParallelLinear)
        )
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    return dense.assemble(model, config, block, chunk, **options)
