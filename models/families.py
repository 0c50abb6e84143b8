"""Model families: their options, builder modules and model sizes.

Each family is one record in `FAMILIES`; no other file refers to families by name. Only builder
modules depend on megatron-core, so they are imported when a model is built, not when a config is
read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from models.config import ModelConfig
from models.decoder_units import decoder_units
from models.huggingface.architectures import (
    DEEPSEEK_V3,
    GEMMA2,
    GLM4_MOE,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    Architecture,
    deepseek_limits,
)
from models.layout import ChunkSpec, Layout, QKVUnits, Split
from models.section import Check, one_of
from models.units import Unit

OWN_KEYS = ("query_pre_attn_scalar", "attention_softcap", "final_softcap", "sliding_window")
"""Keys of the model section that must be null unless listed in `Family.keys`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family."""

    name: str
    """Value of `model.family`."""
    about: str
    """Description for docs/models.md."""
    builder: str = "models.dense"
    """Module that defines `transformer_config`, `build` and `parameter_names`; see
    models/dense.py."""
    activation: str | None = "swiglu"
    """Required value of `model.activation`; None: any value."""
    qk_norm: bool | None = False
    """Required value of `model.qk_norm`; None: either value."""
    mixture: bool = False
    """Whether the layers are mixtures of experts."""
    latent: bool = False
    """Whether attention is multi-head latent attention."""
    zero_centered_gains: bool = False
    """Whether norms multiply by 1 + gain (gain initially 0) instead of gain (initially 1)."""
    post_norms: bool = False
    """Whether attention and the feed-forward block are also followed by norms."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    attention_bias: bool = True
    """Whether `model.attention_bias` may differ from none."""
    keys: tuple[str, ...] = ()
    """The `OWN_KEYS` that models of this family may set."""
    attention_backends: tuple[str, ...] = ("sdpa", "transformer_engine")
    """Allowed values of `model.attention_backend`."""
    hugging_face: tuple[Architecture, ...] = ()
    """transformers classes that can represent models of this family; empty: no export."""
    limits: Callable[[ModelConfig], Iterable[Check]] = lambda model: ()
    """Additional checks on the model settings."""

    def checks(self, model: ModelConfig) -> Iterator[Check]:
        """Check that the family supports the settings of `model`."""
        of, backends = f"for family {self.name}", self.attention_backends
        for key, required in (("qk_norm", self.qk_norm), ("activation", self.activation)):
            other = required not in (None, getattr(model, key))
            yield key, other, f"must be {str(required).lower()} {of}"
        foreign = model.attention_backend not in backends
        yield "attention_backend", foreign, f"must be {' or '.join(backends)} {of}"
        for key, required in (("latent", self.latent), ("moe", self.mixture)):
            missing = getattr(model, key) is None
            yield key, required and missing, f"must be a section {of}"
            yield key, not required and not missing, f"must be null {of}, got a section"
        biased = model.attention_bias != "none" and not self.attention_bias
        yield "attention_bias", biased, f"must be none {of}"
        scaled = model.rope_scaling is not None and self.latent
        yield "rope_scaling", scaled, f"must be null {of}, got a section"
        for key in OWN_KEYS:
            other = getattr(model, key) is not None and key not in self.keys
            yield key, other, f"must be null {of}"
        yield from self.limits(model)

    def units(
        self,
        model: ModelConfig,
        *,
        layers: Iterable[int],
        embedding: bool = True,
        head: bool = True,
        **split: Any,
    ) -> list[Unit]:
        """Return the units of `layers` and, if requested, of the embedding and the head. `split`
        holds fields of `Split`."""
        chunk = ChunkSpec(tuple(layers), embedding, head)
        gain_start = 0.0 if self.zero_centered_gains else 1.0
        return decoder_units(
            model, chunk, Split(**split), post_norms=self.post_norms, gain_start=gain_start
        )

    def roles(self, model: ModelConfig, qkv_units: QKVUnits, split_gate_up: bool) -> list[str]:
        """Return all roles: matrices in forward order, then gains and biases, then the head."""
        layers = {0, 0 if model.moe is None else model.moe.dense_layers}
        units = self.units(
            replace(model, vocab_size=1),  # any size will do
            layers=sorted(layers),
            qkv_units=qkv_units,
            split_gate_up=split_gate_up,
        )
        roles = sorted(units, key=lambda unit: (unit.role == "head", not unit.is_matrix))
        return list(dict.fromkeys(unit.role for unit in roles))

    @property
    def code(self) -> Any:
        """The `builder` module, imported on first use."""
        return import_module(self.builder)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llama",
            about="a plain pre-norm decoder; Qwen2 and Qwen2.5 add biases to queries, keys and "
            "values",
            hugging_face=(LLAMA, QWEN2),
        ),
        Family(
            name="qwen3",
            about="query-key norms, and any head dimension",
            qk_norm=True,
            hugging_face=(QWEN3,),
        ),
        Family(
            name="deepnet",
            about="qwen3 with hundreds of narrow layers, as in the SSO paper's depth experiment",
            qk_norm=True,
            hugging_face=(QWEN3,),
        ),
        Family(
            name="gpt",
            about="any activation, with or without query-key norms",
            activation=None,
            qk_norm=None,
            hugging_face=(LLAMA, QWEN2, QWEN3),
        ),
        Family(
            name="gemma2",
            about="zero-centered gains, a scaled embedding, norms before and after each block, and "
            "optional sliding windows and soft caps on attention scores and logits",
            activation="geglu",
            zero_centered_gains=True,
            post_norms=True,
            scaled_embedding=True,
            attention_bias=False,
            keys=OWN_KEYS,
            attention_backends=("sdpa",),
            hugging_face=(GEMMA2,),
        ),
        Family(
            name="moe",
            about="mixtures of experts after `model.moe.dense_layers` dense layers, as in the "
            "8B-A1B model of the SSO paper",
            builder="models.moe",
            qk_norm=None,
            mixture=True,
            attention_backends=("sdpa",),
            hugging_face=(GLM4_MOE, QWEN3_MOE),
        ),
        Family(
            name="deepseek",
            about="mixtures of experts with multi-head latent attention: DeepSeek-V3 without "
            "multi-token prediction",
            builder="models.moe",
            mixture=True,
            latent=True,
            attention_bias=False,
            attention_backends=("sdpa",),
            hugging_face=(DEEPSEEK_V3,),
            limits=deepseek_limits,
        ),
    )
}


def family_checks(model: ModelConfig) -> Iterator[Check]:
    """Check that the family of `model` exists and supports the settings of `model`."""
    if model.family in FAMILIES:
        yield from FAMILIES[model.family].checks(model)
    else:
        yield "family", True, f"must be {one_of(model.family, FAMILIES)}"


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts and training FLOPs per token; a multiply-add counts as two FLOPs.

    active_parameters   parameters used per token, with `top_k` routed experts per layer
    """

    parameters: int
    active_parameters: int
    flops_per_token: float


def all_units(model: ModelConfig, **split: Any) -> list[Unit]:
    """Return the units of the whole model. Keyword arguments are fields of `Split`."""
    return FAMILIES[model.family].units(model, layers=range(model.layers), **split)


def declare_stage_units(
    model: ModelConfig, chunks: Sequence[ChunkSpec], layout: Layout, **split: Any
) -> list[list[Unit]]:
    """Declare the units on each tensor-parallel rank of a pipeline stage, in forward order.

    `chunks` are the stage's model chunks, in forward order. The keyword arguments are the remaining
    fields of `Split`, such as `expert_rank`.
    """
    family = FAMILIES[model.family]
    split |= {"expert_size": layout.expert, "expert_tensor": layout.expert_tensor}
    return [
        [
            unit
            for chunk in chunks
            for unit in family.units(
                model, **vars(chunk), tensor_rank=rank, tensor_size=layout.tensor, **split
            )
        ]
        for rank in range(layout.tensor)
    ]


@lru_cache(maxsize=64)
def model_size(model: ModelConfig, sequence_length: float) -> ModelSize:
    """Return the parameter counts of `model` and its training FLOPs per token.

    `sequence_length` is the number of tokens in a sequence. If attention does not cross document
    boundaries, it is the attended length instead: on average, a token attends to as many keys as if
    all documents had this length.

    Per token, the forward and backward passes cost 6 FLOPs for each element of every active matrix.
    An embedding that is not tied to the head is only a lookup and costs nothing. Per layer and
    visible key, attention costs 6 * heads * (key head dimension + value head dimension) FLOPs.
    """
    units = all_units(model)
    active = Counter[str]()
    for unit in units:
        active[unit.role] += unit.numel
    if model.moe is not None:  # each token uses only `top_k` of the routed experts
        for role in {unit.role for unit in units if unit.domain == "expert"}:
            active[role] = active[role] // model.moe.experts * model.moe.top_k
    products = {unit.role for unit in units if unit.is_matrix}
    products -= set() if model.tie_embeddings else {"embedding"}
    matrices = sum(active[role] for role in products)
    head = model.head_size + model.value_head_size
    keys = sum(mean_keys(model, layer, sequence_length) for layer in range(model.layers))
    attention = 6 * model.heads * head * keys
    return ModelSize(
        sum(unit.numel for unit in units), sum(active.values()), 6.0 * matrices + attention
    )


def mean_keys(model: ModelConfig, layer: int, sequence_length: float) -> float:
    """Return the mean number of keys that a token attends to in layer `layer`.

    For a sequence of s tokens, the mean is `s / 2` with a causal mask and `w - w^2 / (2 s)` with a
    sliding window of w tokens.
    """
    window = min(model.window(layer) or sequence_length, sequence_length)
    return window - window**2 / (2 * sequence_length)
