"""Measurements for monitors of a run: whole matrices, activations, gradients of micro-batches.

Nothing here changes what a run computes, and no figure is made here: training/monitor makes them.
Start with unit_gather.py.
"""
