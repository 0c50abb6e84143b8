"""State of model and optimizer in coordinates that no layout changes: written, read, compared.

Folders, retention and resuming are not here but in training/checkpoint. Start with state.py.
"""
