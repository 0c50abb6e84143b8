"""The registry of model families. A family is a module with the functions of models/dense.py."""

from types import ModuleType

from models import deepnet, deepseek, gpt, llama, moe, qwen3

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen3": qwen3,
    "deepnet": deepnet,
    "gpt": gpt,
    "moe": moe,
    "deepseek": deepseek,
}
