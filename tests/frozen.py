"""Excludes earlier imports from garbage collection, also in forks; it must be imported last."""

import gc

gc.freeze()
