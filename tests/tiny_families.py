"""A tiny model of every family, which the family tests iterate over.

A family that has the same layers as another needs no entry and uses the other's settings. `python
-m tests.tiny_families` prints docs/models.md with an updated table of families.
"""

from typing import Any

from models.config import LatentConfig, ModelConfig, MoEConfig, RopeScalingConfig
from models.families import FAMILIES
from tests.paths import with_table

SHAPE: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "ffn": 48,
    "vocab_size": 60,
    "norm_epsilon": 0.03,  # large enough to have an effect
}
MIXTURE: dict[str, Any] = {
    "experts": 4,
    "top_k": 2,
    "expert_ffn": 16,
    "shared_experts": 1,
    "dense_layers": 1,
    "sequence_aux_loss": 0.01,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gpt": {"activation": "relu2"},
    "gemma2": {
        "activation": "geglu",
        "query_pre_attn_scalar": 10,
        # Caps comparable to the values and windows shorter than the sequence, so that both have an
        # effect.
        "attention_softcap": 1.0,
        "final_softcap": 0.5,
        "sliding_window": 5,
    },
    "moe": {"qk_norm": True, "moe": MIXTURE},
    "deepseek": {
        "kv_heads": None,
        "head_dim": None,
        "norm_epsilon": 1e-6,
        "latent": {
            "query_rank": 20,
            "kv_rank": 14,
            "nope_head_dim": 8,
            "rope_head_dim": 6,
            "value_head_dim": 10,
        },
        "moe": MIXTURE,
    },
}
"""Settings in each family's model section, other than the shape."""
SAME_LAYERS = {"deepnet": "qwen3"}
"""Families whose layers differ only in shape from those of another family, with that family."""

SECTIONS = {"latent": LatentConfig, "moe": MoEConfig, "rope_scaling": RopeScalingConfig}


def settings(family: str) -> dict[str, Any]:
    """Return the settings in a family's model section, other than the shape."""
    return {"family": family, **SETTINGS[SAME_LAYERS.get(family, family)]}


def model_of(values: dict[str, Any]) -> ModelConfig:
    """Return a model section with `values`, in which subsections are plain mappings."""
    return ModelConfig(
        **{
            key: SECTIONS[key](**value) if key in SECTIONS and isinstance(value, dict) else value
            for key, value in values.items()
        }
    )


def tiny_model(family: str, **changes: Any) -> ModelConfig:
    """Return a tiny model of a family, with changes to its model section."""
    return model_of({**SHAPE, **settings(family), **changes})


def mixture(**changes: Any) -> ModelConfig:
    """Return a tiny three-layer mixture of experts, with experts in two layers, no balancing
    losses, and changes to its section."""
    experts = {**MIXTURE, "shared_experts": 2, "sequence_aux_loss": 0.0, **changes}
    return tiny_model("moe", layers=3, moe=experts)


MODELS = {
    **{name: tiny_model(name) for name in FAMILIES},
    "gpt with query-key norms": tiny_model("gpt", qk_norm=True),
    "tied": tiny_model("llama", tie_embeddings=True, attention_bias="qkv"),
    "all biases": tiny_model("qwen3", attention_bias="all"),
    "gpt with a gate": tiny_model("gpt", activation="geglu"),
    "deepseek without query latent": tiny_model(
        "deepseek", latent={**SETTINGS["deepseek"]["latent"], "query_rank": None}
    ),
    "experts behind a gate": mixture(shared_gate=True),
}
"""A tiny model of every family, plus variants of some families with different weights."""


def overrides(values: dict[str, Any], prefix: str = "model") -> dict[str, Any]:
    """Return `values` in the model section as dotted keys of a run config, with `__` for dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= overrides(value, f"{prefix}__{key}")
        else:
            found[f"{prefix}__{key}"] = "null" if value is None else value
    return found


def table() -> str:
    """Return the table of all families, generated from their records."""
    lines = ["| family | characteristics | feed-forward block | query-key norms | exported as |"]
    lines.append("|" + "---|" * 5)
    norms = {True: "yes", False: "no", None: "`model.qk_norm`"}
    for name, family in FAMILIES.items():
        classes = " or ".join(each.name for each in family.hugging_face) or "not exported"
        block = family.activation or "`model.activation`"
        lines.append(f"| {name} | {family.about} | {block} | {norms[family.qk_norm]} | {classes} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(with_table("models.md", "families", table()), end="")
