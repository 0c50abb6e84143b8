"""transformers classes that can represent this project's models.

Each class has one record with its unsupported settings, its config.json entries and its norm names.
`Family.hugging_face` lists the classes for each family. config.json stores rotary positions as
`rope_parameters` for transformers 5 and as `rope_scaling` for transformers 4.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any, Final

from models.blocks.activation import ACTIVATIONS
from models.config import LLAMA3_KEYS, ModelConfig, MoEConfig, scale_of
from models.section import Check, one_of, problems, shown

LENGTH: Final = "original_max_position_embeddings"
NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", LENGTH, *LLAMA3_KEYS),
    "yarn": ("factor", LENGTH),
}
"""Supported RoPE types, and the keys that each one requires."""
OPTIONAL: Final = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
"""Optional yarn keys, and their defaults."""

MSCALES: Final = ("mscale", "mscale_all_dim")
"""DeepSeek's yarn keys for the attention factor."""


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Return config.json's `rope_parameters`: type, base, and the keys required by the type."""
    base = {"rope_type": "default", "rope_theta": model.rope_base}
    scaling = model.rope_scaling
    if scaling is None:
        return base
    keys = NEEDED[scaling.kind] + (tuple(OPTIONAL) if scaling.kind == "yarn" else ())
    values = {key: getattr(scaling, key) for key in keys}
    given = {key: value for key, value in values.items() if value is not None}
    return {**base, "rope_type": scaling.kind, **given}


class InexpressibleError(ValueError):
    """Raised if no transformers class can represent a model. The message lists the reasons."""


def rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `model.rope_scaling` section for RoPE settings, or None without scaling.

    Raises InexpressibleError for an unknown type, and for keys that are missing or not positive.
    """
    kind = rope.get("rope_type", "default")
    if kind not in NEEDED:
        raise InexpressibleError(f"rope_type must be {one_of(str(kind), NEEDED)}")
    optional = ("beta_fast", "beta_slow", "attention_factor", *MSCALES) if kind == "yarn" else ()
    needed = [*NEEDED[kind], *(key for key in optional if rope.get(key))]
    found = {key: rope.get(key) for key in needed}
    wrong = [k for k, v in found.items() if not (isinstance(v, int | float) and v > 0)]
    if wrong:
        text = f"rope_type {kind} requires positive numbers for {', '.join(wrong)}"
        raise InexpressibleError(text)
    if kind == "default":
        return None
    values = {key: rope[key] for key in NEEDED[kind]}
    if kind == "yarn":
        given = {key: rope.get(key) for key in OPTIONAL}
        # transformers falls back to its default if a value is missing or 0.
        values |= {key: value for key, value in given.items() if value or value is False}
        if "attention_factor" not in values and all(rope.get(key) for key in MSCALES):
            scale, of_all = (0.1 * rope[key] * log(rope["factor"]) + 1 for key in MSCALES)
            values["attention_factor"] = scale / of_all
    return {"kind": kind, **values}


def rope_differences(expected: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[str]:
    """Compare `rope` with `expected` (see `rope_parameters`). Yield a message for each key whose
    values differ."""
    try:
        both = [_computed(expected), _computed(rope)]
    except InexpressibleError as error:
        yield str(error)
        return
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1:
        yield f"partial_rotary_factor must be 1.0 to match the config's model, got {part}"
    for key in dict.fromkeys([*both[0], *both[1]]):
        value, other = (values.get(key) for values in both)
        if value != other:
            yield f"{key} must be {value!r} to match the config's model, got {other!r}"


def _computed(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect rotary positions, with defaults filled in."""
    scaling = rope_scaling(rope) or {"kind": "default"}
    values = {"rope_type": scaling.pop("kind"), "rope_theta": rope.get("rope_theta")}
    if values["rope_type"] == "yarn":
        values |= OPTIONAL | {"attention_factor": 0.1 * log(scaling["factor"]) + 1}
    return values | scaling


LATENT_EPSILON = 1e-6
"""Norm epsilon of DeepSeek's latents in transformers, which config.json cannot set."""
EVERYWHERE: Final = {"none": False, "all": True}
PRE_NORMS: Final = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def mixture_limits(moe: MoEConfig) -> Iterator[Check]:
    """Check that DeepSeek's and GLM's classes support the expert settings.

    Both classes rank expert groups by the sum of the two highest scores in each group.
    """
    yield "score", moe.score != "sigmoid", "must be sigmoid"
    yield "shared_gate", moe.shared_gate, "must be false"
    yield "shared_experts", moe.shared_experts < 1, "must be at least 1"
    groups, used = moe.expert_groups, moe.top_groups
    rule = f"must be at least twice expert_groups = {groups}"
    yield "experts", moe.experts // groups < 2, rule
    rule = f"must be at least {2 * used} and less than {3 * used} with top_groups = {used}"
    yield "top_k", groups > 1 and moe.top_k // used != 2, rule


def softmax_limits(moe: MoEConfig) -> Iterator[Check]:
    """Check that Qwen3MoeForCausalLM supports the expert settings."""
    yield "score", moe.score != "softmax", "must be softmax"
    yield "shared_experts", moe.shared_experts, "must be 0"
    yield "routed_scale", scale_of(moe) != 1, "must be 1"
    yield "expert_groups", moe.expert_groups != 1, "must be 1"


def deepseek_limits(model: ModelConfig) -> Iterator[Check]:
    """Check that transformers can represent a model of family deepseek.

    Other models are rejected before training, because they could not be exported afterwards.
    """
    only = "transformers' DeepseekV3 supports no other value"
    rule = f"must be {LATENT_EPSILON:g}: {only}"
    yield "norm_epsilon", model.norm_epsilon != LATENT_EPSILON, rule
    rule = f"must be null or heads = {model.heads}: {only}"
    yield "kv_heads", model.kv_heads not in (None, model.heads), rule
    rule = "must be null with latent: latent sets the head dimensions"
    yield "head_dim", model.head_dim is not None, rule
    for key, wrong, rule in () if model.moe is None else mixture_limits(model.moe):
        yield f"moe.{key}", wrong, f"{rule}: {only}"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformers class.

    name        class name, e.g. LlamaForCausalLM
    model_type  name of the class in config.json
    settings    returns the class-specific config.json entries for a model
    norms       transformers' names of a layer's norms, keyed by declared name
    qk_norm     whether query and key heads are normalised; None if either is possible
    head_sizes  whether the head dimension may differ from hidden / heads
    whole_heads whether hidden must be divisible by heads, even if the head dimension is given
    experts     checks on the expert settings
    attention_bias  maps each supported `model.attention_bias` to config.json's `attention_bias`, or
                to None if the class has no such entry
    """

    name: str
    model_type: str
    settings: Callable[[ModelConfig], dict[str, Any]]
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    qk_norm: bool | None = False
    whole_heads: bool = False
    head_sizes: bool = True
    experts: Callable[[MoEConfig], Iterator[Check]] = lambda moe: iter(())
    attention_bias: Mapping[str, bool | None] = field(default_factory=lambda: EVERYWHERE)

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return a message for each setting of `model` that this class does not support."""
        checks = (
            (key, wrong, f"{rule} for {self.name}") for key, wrong, rule in self.checks(model)
        )
        return list(problems(model, checks, "model"))

    def checks(self, model: ModelConfig) -> Iterator[Check]:
        """Check that the class supports the settings of `model`."""
        names = " or ".join(name for name, kind in ACTIVATIONS.items() if kind.hugging_face)
        yield "activation", _hidden_act(model) is None, f"must be {names}"
        other = self.qk_norm not in (None, model.qk_norm)
        yield "qk_norm", other, f"must be {shown(self.qk_norm)}"
        uneven = self.whole_heads and model.hidden % model.heads
        yield "hidden", uneven, f"must be divisible by heads = {model.heads}"
        foreign = model.attention_bias not in self.attention_bias
        yield "attention_bias", foreign, f"must be {' or '.join(self.attention_bias)}"
        whole = model.hidden // model.heads
        sized = not self.head_sizes and model.head_size != whole
        yield "head_dim", sized, f"must be null or {whole}"
        for key, wrong, rule in () if model.moe is None else self.experts(model.moe):
            yield f"moe.{key}", wrong, rule


def _hidden_act(model: ModelConfig) -> str | None:
    return ACTIVATIONS[model.activation].hugging_face


def _llama_settings(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": _hidden_act(model), "head_dim": model.head_size, "mlp_bias": False}


def _qwen2_settings(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": _hidden_act(model), "use_sliding_window": False, "sliding_window": None}


def _qwen3_settings(model: ModelConfig) -> dict[str, Any]:
    return {**_qwen2_settings(model), "head_dim": model.head_size}


def _gemma2_settings(model: ModelConfig) -> dict[str, Any]:
    windows = [model.window(layer) for layer in range(model.layers)]
    settings: dict[str, Any] = {
        "hidden_activation": _hidden_act(model),
        "head_dim": model.head_size,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_size,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.final_softcap,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
    if model.sliding_window is not None:
        settings["sliding_window"] = model.sliding_window
    return settings


def _deepseek_settings(model: ModelConfig) -> dict[str, Any]:
    latent, moe = model.latent, model.moe
    assert latent is not None and moe is not None
    return {
        "hidden_act": _hidden_act(model),
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_interleave": True,
        **_mixture(moe),
    }


def _experts(moe: MoEConfig) -> dict[str, Any]:
    """Return the config.json entries common to all mixture-of-experts classes."""
    return {
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn,
        "norm_topk_prob": moe.top_k > 1,  # a single expert's score is not normalised
    }


def _mixture(moe: MoEConfig) -> dict[str, Any]:
    return {
        **_experts(moe),
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": moe.dense_layers,
        "n_group": moe.expert_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": scale_of(moe),
        "num_nextn_predict_layers": 0,
    }


def _glm4_moe_settings(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    whole = 1.0  # transformers rotates only half of each head by default
    return {
        "hidden_act": _hidden_act(model),
        "head_dim": model.head_size,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": whole,
        "rope_parameters": {**rope_parameters(model), "partial_rotary_factor": whole},
        **_mixture(model.moe),
    }


def _qwen3_moe_settings(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    return {
        **_qwen3_settings(model),
        **_experts(model.moe),
        "num_experts": model.moe.experts,
        "mlp_only_layers": list(range(model.moe.dense_layers)),
    }


LLAMA: Final = Architecture(
    name="LlamaForCausalLM", model_type="llama", settings=_llama_settings, whole_heads=True
)
QWEN2: Final = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=_qwen2_settings,
    whole_heads=True,
    head_sizes=False,
    attention_bias={"qkv": None},
)
QWEN3: Final = Architecture(
    name="Qwen3ForCausalLM", model_type="qwen3", settings=_qwen3_settings, qk_norm=True
)
GEMMA2: Final = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    settings=_gemma2_settings,
    norms={
        "attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    whole_heads=True,
)
DEEPSEEK_V3: Final = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    settings=_deepseek_settings,
)
GLM4_MOE: Final = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    settings=_glm4_moe_settings,
    qk_norm=None,
    experts=mixture_limits,
    attention_bias={"none": False, "qkv": True},
)
QWEN3_MOE: Final = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    settings=_qwen3_moe_settings,
    qk_norm=True,
    experts=softmax_limits,
)
