"""The units of a decoder, from its config alone: no engine, no process group, no memory."""

from collections.abc import Iterable

from models.config import ModelConfig
from models.experts import mixture_units
from models.latent import latent_attention_units
from models.units import (
    QKVUnits,
    Unit,
    attention_units,
    gain_unit,
    gated_mlp_units,
    mlp_units,
    vocabulary_unit,
)


def decoder_units(
    model: ModelConfig,
    *,
    layers: Iterable[int],
    post_norms: bool = False,
    gain_start: float = 1.0,
    embedding: bool = True,
    head: bool = True,
    qkv_units: QKVUnits = "head",
    split_gate_up: bool = True,
    tensor_rank: int = 0,
    tensor_size: int = 1,
    expert_rank: int = 0,
    expert_size: int = 1,
    expert_tensor: int = 1,
) -> list[Unit]:
    """Return the units of global layers `layers` on one rank, in forward order.

    Args:
        post_norms: whether attention and feed-forward block are each followed by a norm.
        gain_start: what the gains of norms begin with.
        embedding, head: whether the embedding, and the final norm with the head, are there too.
        qkv_units, split_gate_up: how fused weights are split into units.
        tensor_rank, tensor_size: the tensor-parallel rank, and the number of these ranks.
        expert_rank, expert_size: the same for expert parallelism; a rank holds
            `experts / expert_size` of each layer, with the domain `expert`.
        expert_tensor: ranks that a routed expert's matrices are cut over.
    """

    def gain(name: str) -> Unit:
        return gain_unit(name, model.hidden, start=gain_start)

    found: list[Unit] = []
    if embedding:
        found.append(_vocabulary(model, "embedding", tensor_size))
    for layer in layers:
        prefix = f"layers.{layer}."
        found.append(gain(prefix + "attention_norm"))
        found += _attention(
            model, layer, qkv_units, gain_start, tensor_rank=tensor_rank, tensor_size=tensor_size
        )
        if post_norms:
            found.append(gain(prefix + "post_attention_norm"))
        found.append(gain(prefix + "mlp_norm"))
        if model.moe is None or layer < model.moe.dense_layers:
            found += _feed_forward(model, layer, split_gate_up, tensor_size)
        else:
            found += mixture_units(
                layer,
                model.moe,
                hidden=model.hidden,
                split_gate_up=split_gate_up,
                tensor_size=tensor_size,
                expert_rank=expert_rank,
                expert_size=expert_size,
                expert_tensor=expert_tensor,
            )
        if post_norms:
            found.append(gain(prefix + "post_mlp_norm"))
    if head:
        found.append(gain("final_norm"))
        found.append(_vocabulary(model, "head", tensor_size))
    return found


def _vocabulary(model: ModelConfig, role: str, tensor_size: int) -> Unit:
    return vocabulary_unit(
        role, rows=model.padded_vocab, hidden=model.hidden, tensor_size=tensor_size
    )


def _attention(
    model: ModelConfig, layer: int, granularity: QKVUnits, gain_start: float, **rank: int
) -> list[Unit]:
    """The units of layer `layer`'s attention, with or without latents."""
    if model.latent is not None:
        return latent_attention_units(
            layer,
            model.latent,
            hidden=model.hidden,
            heads=model.heads,
            granularity=granularity,
            gain_start=gain_start,
            **rank,
        )
    return attention_units(
        layer,
        hidden=model.hidden,
        heads=model.heads,
        query_groups=model.query_groups,
        head_size=model.head_size,
        granularity=granularity,
        qk_norm=model.qk_norm,
        gain_start=gain_start,
        **rank,
    )


def _feed_forward(
    model: ModelConfig, layer: int, split_gate_up: bool, tensor_size: int
) -> list[Unit]:
    """The units of layer `layer`'s dense feed-forward block, with or without a gate."""
    shape = {"hidden": model.hidden, "ffn": model.ffn, "tensor_size": tensor_size}
    if model.gated:
        return gated_mlp_units(layer, split_gate_up=split_gate_up, **shape)
    return mlp_units(layer, **shape)
