"""The roles that a model has."""

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import QKVUnits


def roles_of(model: ModelConfig, qkv_units: QKVUnits, split_gate_up: bool) -> list[str]:
    """Return the roles of a model, in the order of a layer's forward."""
    return FAMILIES[model.family].roles(model, qkv_units, split_gate_up)
