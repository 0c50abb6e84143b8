"""Checkpoints on disk: when a run is saved, what makes one complete, how a run goes on from one.

How tensors of many ranks become files is in parallel/checkpoint. Start with files.py, then
resume.py.
"""
