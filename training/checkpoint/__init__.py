"""Checkpoints on disk: saving them, checking that they are complete, and continuing runs from them.

parallel/checkpoint/ writes the tensors of all ranks. Start with checkpoints.py,
then resume.py.
"""
