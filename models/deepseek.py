"""DeepSeek-V3: multi-head latent attention in front of the mixture-of-experts blocks of `moe`.

The model that transformers calls DeepseekV3ForCausalLM, without multi-token prediction: what that
cannot express, the config checks refuse.
"""

from models.moe import build, parameter_names, transformer_config, units

__all__ = ["build", "parameter_names", "transformer_config", "units"]
