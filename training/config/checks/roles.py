"""Roles of the units of a model, from its config alone."""

from models.config import LatentConfig, ModelConfig, MoEConfig


def roles_of(model: ModelConfig, qkv_units: str, split_gate_up: bool) -> tuple[str, ...]:
    """Return the roles of a model's units, in the order of a layer's forward pass."""
    attention = _attention_roles(model.latent, qkv_units == "fused")
    gated = ("gate", "up") if split_gate_up else ("gate_up",)
    feed_forward = (*gated, "down") if model.gated else ("up", "down")
    if model.moe is not None:
        feed_forward = _mixture_roles(model.moe, feed_forward)
    return ("embedding", *attention, "o", *feed_forward, "gain", "head")


def _attention_roles(latent: LatentConfig | None, fused: bool) -> tuple[str, ...]:
    """Return the roles of the projections to queries, keys and values."""
    if latent is None:
        return ("qkv",) if fused else ("q", "k", "v")
    queries = ("q",) if latent.query_rank is None else ("q_a", "q_b")
    return (*queries, "kv_a", *(("kv_b",) if fused else ("k_b", "v_b")))


def _mixture_roles(moe: MoEConfig, block: tuple[str, ...]) -> tuple[str, ...]:
    """Return the roles of dense and mixture-of-experts layers, from those of one feed-forward
    block."""
    dense = block if moe.dense_layers else ()
    shared = tuple(f"shared_{role}" for role in block) if moe.shared_experts else ()
    gate = ("shared_router",) if moe.shared_gate else ()
    return (*dense, *shared, *gate, "router", *(f"expert_{role}" for role in block))
