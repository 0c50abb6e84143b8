"""Imports megatron-core first, as programs do, because other imports of it are slower."""

from models.engine import import_engine

import_engine()
