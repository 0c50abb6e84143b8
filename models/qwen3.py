"""Qwen3: the dense decoder with SwiGLU, query-key norms and a head size of its own."""

from models.dense import build, parameter_names, transformer_config, units

__all__ = ["build", "parameter_names", "transformer_config", "units"]
