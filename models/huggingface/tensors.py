"""Maps parts of this project's parameters to the tensors of a Hugging Face model.

As in megatron-core, one parameter holds the query, key and value heads of all groups, and another
holds gate and up. Hugging Face models store them as separate tensors. Export and import use the
same list of tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from models.config import ModelConfig
from models.families import all_units
from models.huggingface.config_json import architecture
from models.units import ALL, Index, Unit

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


NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "attention.o": "self_attn.o_proj",
    "router": "mlp.gate",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Names in transformers of weights, by name within a layer and, in a feed-forward block, by name
within the block. `Architecture.norms` contains the norms of layers."""
BLOCKS = {"mlp": "mlp", "shared": "mlp.shared_experts"}
"""Names in transformers of the feed-forward blocks of a layer. Experts are separate tensors, the
only layout supported by transformers 4; transformers 5 also supports fused experts."""


def their_tensors(model: ModelConfig) -> list[TheirTensor]:
    """Return every tensor of the Hugging Face model for `model`, in forward order.

    Tensors that share one of this project's parameters are consecutive. Raises InexpressibleError
    if no transformers class can represent `model`.
    """
    names = NAMES | dict(architecture(model).norms)
    tensors: list[TheirTensor] = []
    for unit in all_units(model, qkv_units="fused", split_gate_up=False):
        tensors += _of_parameter(model, unit, names)
        # Only classes with sigmoid scores have the bias.
        if unit.role == "router" and model.moe is not None and model.moe.score == "sigmoid":
            bias = tensors[-1].name.removesuffix(".weight") + SCORE_BIAS
            size = (model.moe.experts,)
            tensors.append(TheirTensor(bias, f"{unit.parameter}.expert_bias", size, (ALL,), size))
    return tensors


def _of_parameter(
    model: ModelConfig, unit: Unit, names: Mapping[str, str]
) -> Iterator[TheirTensor]:
    """Yield the tensors in a parameter, which is a single unit. `names` maps names in this project
    to names in transformers."""
    ours, layer = unit.parameter, ""
    if unit.layer is not None:
        ours, layer = ours.removeprefix(f"layers.{unit.layer}."), f"model.layers.{unit.layer}."
    block, _, name = ours.rpartition(".")
    in_block = f"{layer}{BLOCKS.get(block, f'mlp.{block}')}."
    if name in ("qkv", "qkv_bias"):
        kind, cols = ("weight", unit.axes[2:]) if name == "qkv" else ("bias", ())
        groups, size = model.query_groups, model.head_size
        queries = model.heads // groups
        view_shape = (groups, queries + 2, size, *cols)
        indices: dict[str, int | slice] = {"q": slice(0, queries), "k": queries, "v": queries + 1}
        for role, heads in indices.items():
            hf_name = f"{layer}{names[f'attention.{role}']}.{kind}"
            shape = ((model.heads if role == "q" else groups) * size, *cols)
            yield TheirTensor(hf_name, unit.parameter, view_shape, (ALL, heads), shape)
    elif name == "gate_up":
        for i, half in enumerate(("gate", "up")):
            hf_name = f"{in_block}{names[half]}.weight"
            yield TheirTensor(hf_name, unit.parameter, unit.axes, (i,), unit.axes[1:])
    elif name == "down":
        hf_name = f"{in_block}{names[name]}.weight"
        yield TheirTensor(hf_name, unit.parameter, unit.axes, (ALL,), unit.shape)
    elif ours in ("embedding", "head"):  # without the padding rows
        assert model.vocab_size is not None
        rows, shape = (slice(0, model.vocab_size),), (model.vocab_size, model.hidden)
        yield TheirTensor(f"{names[ours]}.weight", ours, unit.shape, rows, shape)
    else:
        kind = "bias" if name == "o_bias" else "weight"
        hf_name = f"{layer}{names[ours.removesuffix('_bias')]}.{kind}"
        yield TheirTensor(hf_name, unit.parameter, unit.shape, (ALL,), unit.shape)
