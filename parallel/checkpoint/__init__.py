"""Saving, loading and comparing the state of model and optimizer, in logical coordinates that are
the same on any layout.

Folders, retention and resuming are in training/checkpoint. Start with state.py.
"""
