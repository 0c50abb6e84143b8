"""Llama: the dense decoder with SwiGLU and without query-key norms."""

from models.dense import build, parameter_names, transformer_config, units

__all__ = ["build", "parameter_names", "transformer_config", "units"]
