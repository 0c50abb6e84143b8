"""Import megatron-core up front, as programs do, because importing it any other way is slower."""

from models.engine import import_engine

import_engine()
