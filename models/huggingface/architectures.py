"""The classes of transformers that compute models of ours.

One record per class: what of a model it has no setting for, what else config.json says of it, and
how it names norms. `Family.hugging_face` lists the classes of a family.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from models.blocks.activation import ACTIVATIONS
from models.config import LatentConfig, ModelConfig, MoEConfig
from models.huggingface.limits import latent_limits, mixture_limits, softmax_limits
from models.routed_scale import scale_of

PRE_NORMS: Final = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers.

    name        its name, e.g. LlamaForCausalLM
    model_type  its name in config.json
    limits      yields the rule and the value of each setting of a model that it does not have, e.g.
                ("qk_norm must be false", "true")
    settings    what config.json says of a model beside what all classes have in common
    norms       a layer's norms, each with its name there
    """

    name: str
    model_type: str
    limits: Callable[[ModelConfig], Iterator[tuple[str, str]]]
    settings: Callable[[ModelConfig], dict[str, Any]]
    norms: Mapping[str, str]

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return a sentence for each setting of `model` that the class does not have."""
        return [f"model.{rule} for {self.name}, got {value}" for rule, value in self.limits(model)]


def _dense_limits(model: ModelConfig, *, qk_norm: bool) -> Iterator[tuple[str, str]]:
    """What the dense classes have no setting for."""
    if ACTIVATIONS[model.activation].hugging_face is None:
        known = " or ".join(name for name, each in ACTIVATIONS.items() if each.hugging_face)
        yield f"activation must be {known}", model.activation
    if model.qk_norm != qk_norm:
        yield f"qk_norm must be {str(qk_norm).lower()}", str(model.qk_norm).lower()


def _whole_heads(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """The width that transformers wants, although heads have a size of their own."""
    if model.hidden % model.heads:
        yield f"hidden must be divisible by heads = {model.heads}", str(model.hidden)


def _hidden_act(model: ModelConfig) -> str | None:
    return ACTIVATIONS[model.activation].hugging_face


def _llama_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _dense_limits(model, qk_norm=False)
    yield from _whole_heads(model)


def _llama_settings(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": _hidden_act(model), "head_dim": model.head_size, "mlp_bias": False}


def _qwen3_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _dense_limits(model, qk_norm=True)


def _qwen3_settings(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": _hidden_act(model),
        "head_dim": model.head_size,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _gemma2_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _dense_limits(model, qk_norm=False)
    yield from _whole_heads(model)


def _gemma2_settings(model: ModelConfig) -> dict[str, Any]:
    windows = [model.window(layer) for layer in range(model.layers)]
    settings: dict[str, Any] = {
        "hidden_activation": _hidden_act(model),
        "head_dim": model.head_size,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_size,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.final_softcap,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windows],
    }
    if model.sliding_window is not None:
        settings["sliding_window"] = model.sliding_window
    return settings


def _deepseek_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _dense_limits(model, qk_norm=False)
    yield from latent_limits(model)
    yield from _expert_limits(model, mixture_limits)


def _deepseek_settings(model: ModelConfig) -> dict[str, Any]:
    assert model.latent is not None and model.moe is not None
    return {"hidden_act": _hidden_act(model), **_latent(model.latent), **_mixture(model.moe)}


def _latent(latent: LatentConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_interleave": True,
    }


def _expert_limits(
    model: ModelConfig, limits: Callable[[MoEConfig], Iterator[tuple[str, str]]]
) -> Iterator[tuple[str, str]]:
    """What of the experts a class has no setting for."""
    if model.moe is not None:
        yield from ((f"moe.{rule}", value) for rule, value in limits(model.moe))


def _experts(moe: MoEConfig) -> dict[str, Any]:
    """What all classes of mixtures call the same."""
    return {
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn,
        "norm_topk_prob": moe.top_k > 1,  # a single score is not made to be 1
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


def _glm4_moe_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _dense_limits(model, qk_norm=model.qk_norm)
    yield from _expert_limits(model, mixture_limits)


def _glm4_moe_settings(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    whole = 1.0  # transformers would turn half of each head
    return {
        "hidden_act": _hidden_act(model),
        "head_dim": model.head_size,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": whole,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rope_base,
            "partial_rotary_factor": whole,
        },
        **_mixture(model.moe),
    }


def _qwen3_moe_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _qwen3_limits(model)
    yield from _expert_limits(model, softmax_limits)


def _qwen3_moe_settings(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    return {
        **_qwen3_settings(model),
        **_experts(model.moe),
        "num_experts": model.moe.experts,
        "mlp_only_layers": list(range(model.moe.dense_layers)),
    }


LLAMA: Final = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    limits=_llama_limits,
    settings=_llama_settings,
    norms=PRE_NORMS,
)
QWEN3: Final = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    limits=_qwen3_limits,
    settings=_qwen3_settings,
    norms=PRE_NORMS,
)
GEMMA2: Final = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    limits=_gemma2_limits,
    settings=_gemma2_settings,
    norms={
        "attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
)
DEEPSEEK_V3: Final = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    limits=_deepseek_limits,
    settings=_deepseek_settings,
    norms=PRE_NORMS,
)
GLM4_MOE: Final = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    limits=_glm4_moe_limits,
    settings=_glm4_moe_settings,
    norms=PRE_NORMS,
)
QWEN3_MOE: Final = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    limits=_qwen3_moe_limits,
    settings=_qwen3_moe_settings,
    norms=PRE_NORMS,
)
