"""Measurements for monitors of a run: whole matrices, activations, gradients of micro-batches.

Nothing here changes the results of a run; training/monitor computes the figures. Start with
unit_gather.py.
"""
