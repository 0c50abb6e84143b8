"""DeepNet: Qwen3's layers, hundreds of them and narrow; the SSO paper's test of depth."""

from models.dense import build, parameter_names, transformer_config, units

__all__ = ["build", "parameter_names", "transformer_config", "units"]
