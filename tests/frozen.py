"""Import everything that ranks need and exclude it from garbage collection, which also applies to
forks. Must be imported last."""

import gc

gc.disable()

import training.run  # noqa: E402, F401

gc.freeze()
gc.enable()
# Cache the count: every run checks it at startup, and counting takes 50 ms.
FROZEN = gc.get_freeze_count()
gc.get_freeze_count = lambda: FROZEN
