"""What transformers' classes of mixtures of experts have no setting for: a model must have it so.

Those of DeepseekV3ForCausalLM hold for every model of the family deepseek.
"""

from collections.abc import Iterator

from models.config import ModelConfig, MoEConfig
from models.routed_scale import scale_of

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
    yield from _group_limits(moe)


def _group_limits(moe: MoEConfig) -> Iterator[tuple[str, str]]:
    """Yield what keeps groups of experts from being ranked by their best two."""
    groups, used = moe.expert_groups, moe.top_groups
    if groups >= 1 and moe.experts // groups < 2:
        yield f"experts must be at least two for each of expert_groups = {groups}", str(moe.experts)
    if groups > 1 and used >= 1 and moe.top_k // used != 2:
        rule = f"top_k must be two or a bit more, less than three, for each of top_groups = {used}"
        yield rule, str(moe.top_k)


def softmax_limits(moe: MoEConfig) -> Iterator[tuple[str, str]]:
    """Yield (rule, value) of what Qwen3MoeForCausalLM has no setting for."""
    if moe.score != "softmax":
        yield "score must be softmax", moe.score
    if moe.shared_experts:
        yield "shared_experts must be 0", str(moe.shared_experts)
    scale = scale_of(moe)
    if scale != 1:
        yield "routed_scale must be 1", f"{scale:g}"
    if moe.expert_groups != 1:
        yield "expert_groups must be 1", str(moe.expert_groups)


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
        yield from (f"moe.{rule}, got {value}" for rule, value in mixture_limits(model.moe))
