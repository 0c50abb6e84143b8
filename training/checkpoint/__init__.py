"""Checkpoints on disk: saving, verifying and resuming from them.

parallel/checkpoint/ writes the tensors of all ranks. Start with checkpoints.py, then resume.py.
"""
