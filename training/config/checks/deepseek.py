"""What transformers' DeepseekV3ForCausalLM has no setting for, and so the family must not have.

Else a run would train for weeks and then could not be exported.
"""

from collections.abc import Iterator

from models.config import ModelConfig, MoEConfig
from models.huggingface.limits import latent_limits, mixture_limits


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
    yield from (f"{rule}, got {value}" for rule, value in latent_limits(section))
    if section.moe is not None:
        yield from (f"moe.{line}" for line in _mixture(section.moe))


def _mixture(moe: MoEConfig) -> Iterator[str]:
    """The settings of the experts that are not free."""
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
