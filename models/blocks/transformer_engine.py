"""Transformer Engine's layer spec: the only file that knows whether it is installed."""

from importlib.util import find_spec

from megatron.core.transformer.spec_utils import ModuleSpec


def installed() -> bool:
    """Return whether Transformer Engine can be imported."""
    return find_spec("transformer_engine") is not None


def layer_spec(qk_norm: bool = False) -> ModuleSpec:
    """Return Megatron's spec of a dense transformer layer on Transformer Engine modules.

    Raises ModuleNotFoundError if Transformer Engine is not installed.
    """
    if not installed():
        raise ModuleNotFoundError("Transformer Engine is not installed")
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
