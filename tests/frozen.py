"""Imported last, keeps what was imported before out of every search for garbage, in forks too."""

import gc

gc.freeze()
