"""config.json: a model's Hugging Face architecture and settings."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families import FAMILIES
from models.huggingface.architectures import (
    Architecture,
    InexpressibleError,
    rope_differences,
    rope_parameters,
    rope_scaling,
)
from models.section import one_of

ROPE_KEYS = ("rope_theta", "rope_parameters", "partial_rotary_factor")
"""Keys whose location in config.json depends on the version of transformers."""

CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}
"""Rarely used config.json keys, and their values for causal attention."""


def architecture(model: ModelConfig) -> Architecture:
    """Return the transformers class that can represent `model`.

    Raises InexpressibleError if there is no class for the family, or if no class supports every
    setting of `model`. In the second case, the message lists the settings not supported by the
    closest class.
    """
    family = FAMILIES.get(model.family)
    if family is None:
        raise InexpressibleError(f"model.family must be {one_of(model.family, FAMILIES)}")
    if not family.hugging_face:
        raise InexpressibleError(
            f"model.family must be a family with a class in transformers, got {family.name}"
        )
    nearest = min(family.hugging_face, key=lambda kind: len(kind.obstacles(model)))
    obstacles = nearest.obstacles(model)
    if obstacles:
        raise InexpressibleError("; ".join(obstacles))
    return nearest


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json settings that affect the model's computation.

    Raises InexpressibleError if no transformers class can represent `model`.
    """
    chosen = architecture(model)
    bias = chosen.attention_bias[model.attention_bias]
    return {
        "architectures": [chosen.name],
        "model_type": chosen.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        # transformers 4 reads rope_theta, transformers 5 reads rope_parameters. If its key is
        # missing, each version silently falls back to base 10000.
        "rope_theta": model.rope_base,
        "rope_parameters": rope_parameters(model),
        **({} if bias is None else {"attention_bias": bias}),
        **chosen.settings(model),
    }


LLAMA3_LONGER = 16
"""Ratio of max_position_embeddings to original_max_position_embeddings in Llama 3.1, 3.2 and 3.3.
The RoPE scaling `factor` of these models is different."""

READABLE = {"llama": "llama", "qwen2": "llama", "qwen3": "qwen3", "gemma2": "gemma2"}
"""Maps the model types supported by `model_section` to families."""


def model_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `model` section of a run config for the model described by config.json.

    `differences` finds the settings that the section cannot express. Raises InexpressibleError for
    model types not listed in `READABLE` and for unsupported rotary positions.
    """
    kind = settings.get("model_type")
    if kind not in READABLE:
        raise InexpressibleError(f"model_type must be one of {', '.join(READABLE)}, got {kind!r}")
    rope = settings.get("rope_parameters") or settings
    family = FAMILIES[READABLE[kind]]
    biased = "all" if settings.get("attention_bias") else "none"
    section = {
        "family": family.name,
        "activation": family.activation,
        "qk_norm": family.qk_norm,
        "attention_bias": "qkv" if kind == "qwen2" else biased,
        "layers": settings["num_hidden_layers"],
        "hidden": settings["hidden_size"],
        "heads": settings["num_attention_heads"],
        "kv_heads": settings["num_key_value_heads"],
        "head_dim": settings.get("head_dim"),
        "ffn": settings["intermediate_size"],
        "vocab_size": settings["vocab_size"],
        "tie_embeddings": bool(settings.get("tie_word_embeddings")),
        "rope_base": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": rope_scaling(rope),
        "norm_epsilon": settings["rms_norm_eps"],
    }
    if kind == "gemma2":
        section |= {
            "query_pre_attn_scalar": settings["query_pre_attn_scalar"],
            "attention_softcap": settings["attn_logit_softcapping"],
            "final_softcap": settings["final_logit_softcapping"],
            "sliding_window": settings["sliding_window"],
        }
    return section


def config_json(
    model: ModelConfig, *, dtype: str, positions: int, end_token: int | None
) -> dict[str, Any]:
    """Return the contents of config.json.

    `dtype` is torch's name for the dtype of the weights, `positions` is the training sequence
    length, and `end_token` is the id of the end-of-document token.
    """
    scaling, rope = model.rope_scaling, rope_parameters(model)
    return {
        **model_settings(model),
        # Read by transformers 4, which takes the base from `rope_theta`.
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaling else None,
        "max_position_embeddings": max_positions(model, positions),
        # A single value for all matrices; transformers only uses it to initialise new matrices.
        "initializer_range": model.hidden**-0.5 if model.init.std is None else model.init.std,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,  # the embedding row of a padding id would not be trained
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def max_positions(model: ModelConfig, length: int) -> int:
    """Return the exported `max_position_embeddings`. This is the larger of the training sequence
    length and the context length after RoPE scaling."""
    scaling = model.rope_scaling
    if scaling is None:
        return length
    longer = LLAMA3_LONGER if scaling.kind == "llama3" else scaling.factor
    return max(length, int(longer * (scaling.original_max_position_embeddings or 0)))


def differences(expected: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Compare `settings` with `expected` (see `model_settings`). Return a message for each key
    whose values differ.

    `settings` is a config.json with transformers' defaults filled in.
    """
    rope = settings.get("rope_parameters") or {"rope_theta": settings.get("rope_theta")}
    key = "partial_rotary_factor"
    elsewhere = {key: settings[key]} if key in settings else {}
    causal = {key: value for key, value in CAUSAL.items() if settings.get(key) is not None}
    return [
        f"{key} must be {value!r} to match the config's model, got {settings.get(key)!r}"
        for key, value in {**expected, **causal}.items()
        if key not in ROPE_KEYS and settings.get(key) != value
    ] + [*rope_differences(expected["rope_parameters"], {**elsewhere, **rope})]
