"""Imports the modules of ranks, and excludes all imports from garbage collection, also in forks; it
must be imported last."""

import gc

gc.disable()

import training.run  # noqa: E402, F401

gc.freeze()
gc.enable()
# Every start of a run asks for the count, which takes 50 ms.
FROZEN = gc.get_freeze_count()
gc.get_freeze_count = lambda: FROZEN
