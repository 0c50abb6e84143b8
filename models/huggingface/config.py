"""config.json: which Hugging Face architecture is our model, with which settings."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.families import FAMILIES
from models.huggingface.architectures import Architecture
from models.section import named

ROPE_KEYS = ("rope_theta", "rope_parameters", "partial_rotary_factor")
"""Keys that versions of transformers keep in different places."""

CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}
"""Keys that few files have, which could let a token attend to later ones."""


class InexpressibleError(ValueError):
    """A model that no class of transformers computes; the message names what it lacks."""


def architecture(model: ModelConfig) -> Architecture:
    """Return the class of transformers that computes `model`.

    Raises InexpressibleError for a family without a class, else with every setting that stands
    against the class that comes nearest.
    """
    family = FAMILIES.get(model.family)
    if family is None:
        raise InexpressibleError(f"model.family must be {named(model.family, FAMILIES)}")
    if not family.hugging_face:
        raise InexpressibleError(
            f"model.family must have a class in transformers to be exported, got {family.name}"
        )
    nearest = min(family.hugging_face, key=lambda kind: len(kind.obstacles(model)))
    obstacles = nearest.obstacles(model)
    if obstacles:
        raise InexpressibleError("; ".join(obstacles))
    return nearest


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of config.json that decide what the model computes.

    Raises InexpressibleError as `architecture` does.
    """
    chosen = architecture(model)
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
        "attention_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        # transformers 5 reads the second form, 4 the first; either silently takes 10000 without.
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        **chosen.settings(model),
    }


READABLE = ("llama", "qwen3", "gemma2")
"""Model types, and families, whose settings `model_section` reads."""


def model_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `model` of a run config for the model that config.json describes.

    What the section cannot say is found by `differences`. Raises InexpressibleError for a model
    type that is not in `READABLE`.
    """
    kind = settings.get("model_type")
    if kind not in READABLE:
        raise InexpressibleError(f"model_type must be one of {', '.join(READABLE)}, got {kind!r}")
    rope = settings.get("rope_parameters") or settings
    section = {
        "family": kind,
        "activation": FAMILIES[kind].activation,
        "qk_norm": FAMILIES[kind].qk_norm,
        "layers": settings["num_hidden_layers"],
        "hidden": settings["hidden_size"],
        "heads": settings["num_attention_heads"],
        "kv_heads": settings["num_key_value_heads"],
        "head_dim": settings.get("head_dim"),
        "ffn": settings["intermediate_size"],
        "vocab_size": settings["vocab_size"],
        "tie_embeddings": bool(settings.get("tie_word_embeddings")),
        "rope_base": float(rope.get("rope_theta", 10000.0)),
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
    """Return the content of config.json.

    `dtype` is torch's name of the weights' type, `positions` the length of the sequences trained
    on, `end_token` the id of the token that ends a document.
    """
    return {
        **model_settings(model),
        "rope_scaling": None,
        "max_position_embeddings": positions,
        # One number for all matrices, which transformers uses for new ones alone.
        "initializer_range": model.hidden**-0.5 if model.init.std is None else model.init.std,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,  # one would keep its embedding row from being trained
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def differences(wanted: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting of `wanted` (`model_settings`) that differs in `theirs`.

    `theirs` is a config.json with transformers' defaults filled in.
    """
    causal = {key: value for key, value in CAUSAL.items() if theirs.get(key) is not None}
    return [
        f"{key} is {theirs.get(key)!r}, the config's model has {value!r}"
        for key, value in {**wanted, **causal}.items()
        if key not in ROPE_KEYS and theirs.get(key) != value
    ] + _rope_differences(wanted, theirs)


def _rope_differences(wanted: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    rope = theirs.get("rope_parameters") or {"rope_theta": theirs.get("rope_theta")}
    base = wanted["rope_theta"]
    kind = rope.get("rope_type", "default")
    lines = [f"rope_type is {kind!r}, there is only 'default'"] if kind != "default" else []
    part = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
    if part != 1:
        lines.append(f"partial_rotary_factor is {part}, the config's model has 1.0")
    if rope.get("rope_theta") != base:
        lines.append(f"rope_theta is {rope.get('rope_theta')!r}, the config's model has {base!r}")
    return lines
