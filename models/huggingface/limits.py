"""What transformers' DeepseekV3ForCausalLM has no setting for: a model must have it so."""

from collections.abc import Iterator

from models.config import ModelConfig, MoEConfig

LATENT_EPSILON = 1e-6
"""What transformers gives the norms of DeepSeek's latents, whatever config.json says."""


def latent_limits(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(rule, value) of each setting beside the experts' that breaks one: `("norm_epsilon must be
    1e-06", "1e-05")`."""
    if model.norm_epsilon != LATENT_EPSILON:
        yield f"norm_epsilon must be {LATENT_EPSILON:g}", f"{model.norm_epsilon:g}"


def mixture_limits(moe: MoEConfig) -> Iterator[tuple[str, str]]:
    """(rule, value) of each setting of the experts that breaks one."""
    if moe.score != "sigmoid":
        yield "score must be sigmoid", moe.score
    if moe.shared_gate:
        yield "shared_gate must be false", "true"
    if moe.shared_experts < 1:
        yield "shared_experts must be at least 1", str(moe.shared_experts)
