"""What transformers' DeepseekV3ForCausalLM has no setting for, and so the family must not have.

Else a run would train for weeks and then could not be exported.
"""

from collections.abc import Iterator

from models.config import ModelConfig, MoEConfig

NORM_EPSILON = 1e-6
"""What transformers gives the norms of the latents, whatever its config says."""


def deepseek(section: ModelConfig) -> Iterator[str]:
    """What of a model of the family deepseek Hugging Face cannot express."""
    for line in _settings(section):
        yield f"{line}: transformers' DeepseekV3 has nothing else"


def _settings(section: ModelConfig) -> Iterator[str]:
    """The settings that are not free."""
    if section.kv_heads not in (None, section.heads):
        yield f"kv_heads must be null or heads = {section.heads}, got {section.kv_heads}"
    if section.head_dim is not None:
        yield f"head_dim must be null beside latent, which has the sizes, got {section.head_dim}"
    if section.norm_epsilon != NORM_EPSILON:
        yield f"norm_epsilon must be {NORM_EPSILON:g}, got {section.norm_epsilon:g}"
    if section.moe is not None:
        yield from (f"moe.{line}" for line in _mixture(section.moe))


def _mixture(moe: MoEConfig) -> Iterator[str]:
    """The settings of the experts that are not free."""
    if moe.score != "sigmoid":
        yield f"score must be sigmoid, got {moe.score}"
    if moe.shared_gate:
        yield "shared_gate must be false, got true"
    if moe.shared_experts < 1:
        yield f"shared_experts must be at least 1, got {moe.shared_experts}"
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
