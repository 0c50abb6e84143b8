"""State of model and optimizer in logical coordinates, the same on any layout: saved, loaded,
compared.

Folders, retention and resuming are in training/checkpoint. Start with state.py.
"""
