"""The units of a decoder, from its config alone: no engine, no process group, no memory."""

from models.config import ModelConfig
from models.experts import mixture_units
from models.latent import latent_attention_units
from models.layout import ChunkSpec, Split
from models.units import (
    Unit,
    attention_units,
    gain_unit,
    gated_mlp_units,
    mlp_units,
    vocabulary_unit,
)


def decoder_units(
    model: ModelConfig, chunk: ChunkSpec, split: Split, *, post_norms: bool, gain_start: float
) -> list[Unit]:
    """Return the units of a chunk on one rank, in forward order.

    With `post_norms` attention and feed-forward block are each followed by a norm. The gains of
    norms begin with `gain_start`.
    """

    def gain(name: str) -> Unit:
        return gain_unit(name, model.hidden, start=gain_start)

    def vocabulary(role: str) -> Unit:
        return vocabulary_unit(role, (model.padded_vocab, model.hidden), split.tensor_size)

    units = [vocabulary("embedding")] if chunk.embedding else []
    attention = attention_units if model.latent is None else latent_attention_units
    for layer in chunk.layers:
        prefix = f"layers.{layer}."
        units.append(gain(prefix + "attention_norm"))
        units += attention(model, layer, split, gain_start)
        if post_norms:
            units.append(gain(prefix + "post_attention_norm"))
        units.append(gain(prefix + "mlp_norm"))
        moe = model.mixture(layer)
        if moe is not None:
            units += mixture_units(layer, model.hidden, moe, split)
        elif model.gated:
            units += gated_mlp_units(
                layer, model.hidden, model.ffn, split.split_gate_up, split.tensor_size
            )
        else:
            units += mlp_units(layer, model.hidden, model.ffn, split.tensor_size)
        if post_norms:
            units.append(gain(prefix + "post_mlp_norm"))
    if chunk.head:
        units += [gain("final_norm"), vocabulary("head")]
    return units
