"""Roles of the units of a model, from its config alone."""

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import QKVUnits


def roles_of(model: ModelConfig, qkv_units: QKVUnits, split_gate_up: bool) -> list[str]:
    """Return the roles of a model's units, in the order of a layer's forward pass."""
    return FAMILIES[model.family].roles(model, qkv_units, split_gate_up)
