"""Checkpoints on disk: saving, completeness, and continuing of runs.

parallel/checkpoint/ writes the tensors of all ranks. Start with checkpoints.py,
then resume.py.
"""
