"""GPT: the dense decoder with squared ReLU or SwiGLU, query-key norms as the config says."""

from models.dense import build, parameter_names, transformer_config, units

__all__ = ["build", "parameter_names", "transformer_config", "units"]
