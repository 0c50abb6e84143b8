"""What transformers' DeepseekV3ForCausalLM has no setting for: a model must have it so."""

from collections.abc import Iterator

from models.config import ModelConfig, MoEConfig

LATENT_EPSILON = 1e-6
"""What transformers gives the norms of DeepSeek's latents, whatever config.json says."""


def latent_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (rule, value) of each setting outside the experts that breaks a rule.

    For example `("norm_epsilon must be 1e-06", "1e-05")`.
    """
    if model.norm_epsilon != LATENT_EPSILON:
        yield f"norm_epsilon must be {LATENT_EPSILON:g}", f"{model.norm_epsilon:g}"


def mixture_limits(moe: MoEConfig) -> Iterator[tuple[str, str]]:
    """Yield (rule, value) of each setting of the experts that breaks a rule."""
    if moe.score != "sigmoid":
        yield "score must be sigmoid", moe.score
    if moe.shared_gate:
        yield "shared_gate must be false", "true"
    if moe.shared_experts < 1:
        yield "shared_experts must be at least 1", str(moe.shared_experts)


def deepseek_limits(model: ModelConfig) -> Iterator[str]:
    """Yield what transformers cannot express of a model of the family deepseek.

    It is refused before training: a run that trained for weeks could not be exported.
    """
    for line in _settings(model):
        yield f"{line}: transformers' DeepseekV3 has no setting for it"


def _settings(model: ModelConfig) -> Iterator[str]:
    """Yield the settings that are not free."""
    if model.kv_heads not in (None, model.heads):
        yield f"kv_heads must be null or heads = {model.heads}, got {model.kv_heads}"
    if model.head_dim is not None:
        yield f"head_dim must be null beside latent, which has the sizes, got {model.head_dim}"
    yield from (f"{rule}, got {value}" for rule, value in latent_limits(model))
    if model.moe is not None:
        yield from (f"moe.{line}" for line in _experts(model.moe))


def _experts(moe: MoEConfig) -> Iterator[str]:
    """Yield the settings of the experts that are not free."""
    yield from (f"{rule}, got {value}" for rule, value in mixture_limits(moe))
    if moe.expert_groups >= 1 and moe.experts // moe.expert_groups < 2:
        yield (
            "experts must be at least two for each of expert_groups = "
            f"{moe.expert_groups}, got {moe.experts}"
        )
    if moe.expert_groups > 1 and moe.top_groups >= 1 and moe.top_k // moe.top_groups != 2:
        yield (
            "top_k must be two or a bit more, less than three, for each of top_groups = "
            f"{moe.top_groups}, got {moe.top_k}"
        )
