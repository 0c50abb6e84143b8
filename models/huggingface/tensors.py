"""Maps parts of this project's parameters to the tensors of a Hugging Face model.

As in megatron-core, one parameter holds the query, key and value heads of all groups, and another
holds gate and up. Hugging Face models store them as separate tensors. Export and import use the
same list of tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from models.config import LatentConfig, ModelConfig, MoEConfig
from models.huggingface.config_json import architecture
from models.units import ALL, Index

SCORE_BIAS = ".e_score_correction_bias"
"""Name suffix of the float32 buffer with the bias that is added to expert scores."""


@dataclass(frozen=True)
class TheirTensor:
    """A tensor in a Hugging Face model, and the corresponding part of a parameter in this project.

    name       name in transformers, e.g. `model.layers.0.self_attn.q_proj.weight`
    parameter  declared name of the parameter or buffer, e.g. `layers.0.attention.qkv`
    view_shape shape of a view of the whole parameter
    index      index of the part in this view
    shape      shape in transformers
    """

    name: str
    parameter: str
    view_shape: tuple[int, ...]
    index: Index
    shape: tuple[int, ...]

    @property
    def buffer(self) -> bool:
        """Whether the tensor is a buffer rather than a parameter."""
        return self.name.endswith(SCORE_BIAS)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def take(self, parameter: Tensor) -> Tensor:
        """Return the tensor `[*shape]` in `parameter`, as a copy if its rows are not contiguous."""
        return parameter.view(self.view_shape)[self.index].reshape(self.shape)

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Write the Hugging Face tensor `value` into `parameter`."""
        part = parameter.view(self.view_shape)[self.index]
        part.copy_(value.reshape(part.shape))


def their_tensors(model: ModelConfig) -> list[TheirTensor]:
    """Return every tensor of the Hugging Face model for `model`, in forward order.

    Tensors that share one of this project's parameters are consecutive. Raises InexpressibleError
    if no transformers class can represent `model`.
    """
    norms = architecture(model).norms

    def norm(layer: int, ours: str) -> Iterator[TheirTensor]:
        """Yield the gain of norm `ours` in layer `layer`, if the class uses this norm."""
        if ours in norms:
            hf_name = f"model.layers.{layer}.{norms[ours]}.weight"
            yield _gain(f"layers.{layer}.{ours}", hf_name, model.hidden)

    tensors = [_vocabulary(model, "embedding", "model.embed_tokens.weight")]
    for layer in range(model.layers):
        ours, hf_name = f"layers.{layer}.", f"model.layers.{layer}."
        tensors += norm(layer, "attention_norm")
        if model.latent is None:
            tensors += _attention(model, ours + "attention.", hf_name + "self_attn.")
        else:
            tensors += _latent(model, model.latent, ours + "attention.", hf_name + "self_attn.")
        tensors += norm(layer, "post_attention_norm")
        tensors += norm(layer, "mlp_norm")
        moe = model.mixture(layer)
        if moe is None:
            tensors += _gated(ours + "mlp.", hf_name + "mlp.", model.hidden, model.ffn)
        else:
            tensors += _mixture(model, moe, ours, hf_name + "mlp.")
        tensors += norm(layer, "post_mlp_norm")
    tensors.append(_gain("final_norm", "model.norm.weight", model.hidden))
    if not model.tie_embeddings:
        tensors.append(_vocabulary(model, "head", "lm_head.weight"))
    return tensors


def _vocabulary(model: ModelConfig, ours: str, hf_name: str) -> TheirTensor:
    """Return the embedding or head without its padding rows."""
    assert model.vocab_size is not None
    layout = (model.padded_vocab, model.hidden)
    rows = slice(0, model.vocab_size)
    return TheirTensor(hf_name, ours, layout, (rows,), (model.vocab_size, model.hidden))


def _gain(ours: str, hf_name: str, size: int) -> TheirTensor:
    return TheirTensor(hf_name, ours, (size,), (ALL,), (size,))


def _matrix(ours: str, hf_name: str, shape: tuple[int, int]) -> TheirTensor:
    return TheirTensor(f"{hf_name}.weight", ours, shape, (ALL,), shape)


def _attention(model: ModelConfig, ours: str, hf_name: str) -> Iterator[TheirTensor]:
    groups, size, hidden = model.query_groups, model.head_size, model.hidden
    queries = model.heads // groups
    layout = (groups, queries + 2, size, hidden)
    parts: list[tuple[str, Index, int]] = [
        ("q_proj", (ALL, slice(0, queries)), model.heads),
        ("k_proj", (ALL, queries), groups),
        ("v_proj", (ALL, queries + 1), groups),
    ]
    for name, index, heads in parts:
        shape = (heads * size, hidden)
        yield TheirTensor(f"{hf_name}{name}.weight", ours + "qkv", layout, index, shape)
    for name, index, heads in parts if model.attention_bias != "none" else ():
        bias, flat = f"{hf_name}{name}.bias", (heads * size,)
        yield TheirTensor(bias, ours + "qkv_bias", layout[:-1], index, flat)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield _gain(ours + name, f"{hf_name}{name}.weight", size)
    yield _matrix(ours + "o", hf_name + "o_proj", (hidden, model.heads * size))
    if model.attention_bias == "all":
        yield _gain(ours + "o_bias", hf_name + "o_proj.bias", hidden)


def _latent(
    model: ModelConfig, latent: LatentConfig, ours: str, hf_name: str
) -> Iterator[TheirTensor]:
    hidden, heads = model.hidden, model.heads
    rows = heads * model.head_size
    if latent.query_rank is None:
        yield _matrix(ours + "q", hf_name + "q_proj", (rows, hidden))
    else:
        yield _matrix(ours + "q_a", hf_name + "q_a_proj", (latent.query_rank, hidden))
        yield _gain(ours + "q_a_norm", hf_name + "q_a_layernorm.weight", latent.query_rank)
        yield _matrix(ours + "q_b", hf_name + "q_b_proj", (rows, latent.query_rank))
    shape = (latent.kv_rank + latent.rope_head_dim, hidden)
    yield _matrix(ours + "kv_a", hf_name + "kv_a_proj_with_mqa", shape)
    yield _gain(ours + "kv_a_norm", hf_name + "kv_a_layernorm.weight", latent.kv_rank)
    both = heads * (latent.nope_head_dim + latent.value_head_dim)
    yield _matrix(ours + "kv_b", hf_name + "kv_b_proj", (both, latent.kv_rank))
    yield _matrix(ours + "o", hf_name + "o_proj", (hidden, heads * latent.value_head_dim))


def _gated(ours: str, hf_name: str, hidden: int, ffn: int) -> Iterator[TheirTensor]:
    for i, name in enumerate(("gate_proj", "up_proj")):
        layout, shape = (2, ffn, hidden), (ffn, hidden)
        yield TheirTensor(f"{hf_name}{name}.weight", ours + "gate_up", layout, (i,), shape)
    yield _matrix(ours + "down", hf_name + "down_proj", (hidden, ffn))


def _mixture(model: ModelConfig, moe: MoEConfig, ours: str, hf_name: str) -> Iterator[TheirTensor]:
    """Yield a layer's experts as separate tensors, the only layout supported by transformers 4;
    transformers 5 also supports fused experts."""
    hidden = model.hidden
    yield _matrix(ours + "router", hf_name + "gate", (moe.experts, hidden))
    if moe.score == "sigmoid":  # only classes with sigmoid scores have the bias
        bias = f"{hf_name}gate{SCORE_BIAS}"
        yield _gain(ours + "router.expert_bias", bias, moe.experts)
    if moe.shared_experts:
        shared = moe.shared_experts * moe.expert_ffn
        yield from _gated(ours + "shared.", hf_name + "shared_experts.", hidden, shared)
    for expert in range(moe.experts):
        infix = f"experts.{expert}."
        yield from _gated(ours + infix, hf_name + infix, hidden, moe.expert_ffn)
