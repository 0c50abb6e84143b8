"""Checkpoints on disk: when a run saves one, what makes it complete, and how a run continues.

How the tensors of many ranks become files is in parallel/checkpoint/. Start with checkpoints.py,
then resume.py.
"""
