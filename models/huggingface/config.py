"""config.json: which Hugging Face architecture is our model, with which settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from models.config import LatentConfig, ModelConfig, MoEConfig
from models.huggingface.limits import latent_limits, mixture_limits
from models.load_balance import routed_scale

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


class InexpressibleError(ValueError):
    """A model that no architecture of Hugging Face computes; the message names what it lacks."""


def architecture(model: ModelConfig) -> str:
    """The name of the class in transformers that computes `model`.

    Raises InexpressibleError with every setting that stands against it.
    """
    found = list(_obstacles(model))
    if found:
        raise InexpressibleError("; ".join(found))
    if model.latent is not None:
        return "DeepseekV3ForCausalLM"
    return "Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM"


def _obstacles(model: ModelConfig) -> Iterator[str]:
    """A sentence for each setting that Hugging Face's Llama, Qwen3 and DeepSeek-V3 do not have."""
    if not model.gated:
        yield f"model.activation must be swiglu for Hugging Face, got {model.activation}"
    if model.latent is None and model.moe is not None:
        yield (
            "model.moe must be null without model.latent for Hugging Face: no architecture has "
            f"grouped-query attention with experts routed as family {model.family} does"
        )
    if model.latent is None and not model.qk_norm and model.hidden % model.heads:
        yield (
            f"model.hidden must be divisible by heads = {model.heads} for LlamaForCausalLM, "
            f"got {model.hidden}"
        )
    limits = list(latent_limits(model)) if model.latent is not None else []
    if model.moe is not None:
        limits += [(f"moe.{rule}", value) for rule, value in mixture_limits(model.moe)]
    for rule, value in limits:
        yield f"model.{rule} for DeepseekV3ForCausalLM, got {value}"


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """The settings of config.json that decide what the model computes.

    Raises InexpressibleError as `architecture` does.
    """
    name = architecture(model)
    settings: dict[str, Any] = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": False,
        "tie_word_embeddings": False,
        # transformers 5 reads the second form, 4 the first; either silently takes 10000 without.
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
    }
    if model.latent is not None and model.moe is not None:
        return settings | _latent(model.latent) | _mixture(model.moe)
    settings["head_dim"] = model.head_size
    if name == "LlamaForCausalLM":
        return {**settings, "mlp_bias": False}
    return {**settings, "use_sliding_window": False, "sliding_window": None}


def _latent(latent: LatentConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_interleave": True,
    }


def _mixture(moe: MoEConfig) -> dict[str, Any]:
    scale = moe.routed_scale
    if scale is None:
        scale = routed_scale(moe.experts, moe.top_k, moe.shared_experts, moe.score)
    return {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn,
        "first_k_dense_replace": moe.dense_layers,
        "n_group": moe.expert_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.top_k > 1,  # a single score is not made to be 1
        "routed_scaling_factor": scale,
        "num_nextn_predict_layers": 0,
    }


def config_json(
    model: ModelConfig, *, dtype: str, positions: int, end_token: int | None
) -> dict[str, Any]:
    """The content of config.json. `dtype` is torch's name of the weights' type, `positions` the
    length of the sequences trained on, `end_token` the id of the token that ends a document."""
    return {
        **model_settings(model),
        "rope_scaling": None,
        "max_position_embeddings": positions,
        "initializer_range": model.init.std,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,  # one would keep its embedding row from being trained
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting of `wanted` (`model_settings`) that `found`, a config.json with
    transformers' defaults filled in, has otherwise. Tied embeddings are none: two equal copies."""
    return [
        f"{key} is {found.get(key)!r}, the config's model has {value!r}"
        for key, value in wanted.items()
        if key not in ("rope_theta", "rope_parameters", "tie_word_embeddings")
        and found.get(key) != value
    ] + _rope_differences(wanted, found)


def _rope_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    rope = found.get("rope_parameters") or {"rope_theta": found.get("rope_theta")}
    base = wanted["rope_theta"]
    kind = rope.get("rope_type", "default")
    lines = [f"rope_type is {kind!r}, there is only 'default'"] if kind != "default" else []
    if rope.get("rope_theta") != base:
        lines.append(f"rope_theta is {rope.get('rope_theta')!r}, the config's model has {base!r}")
    return lines
