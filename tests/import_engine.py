"""Imports megatron-core as programs do: before anything else that would import it, more slowly."""

from models.engine import import_engine

import_engine()
