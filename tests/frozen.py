"""Imports the modules of ranks, and excludes all imports from garbage collection, also in forks; it
must be imported last."""

import gc

gc.disable()

import training.run  # noqa: E402, F401

gc.freeze()
gc.enable()
