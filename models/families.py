"""The registry of model families. A family is a module with the functions of models/llama.py."""

from types import ModuleType

from models import llama

FAMILIES: dict[str, ModuleType] = {"llama": llama}
