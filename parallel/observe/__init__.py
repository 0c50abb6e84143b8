"""Measurements for monitoring a run: whole matrices, activations, per-micro-batch gradients.

Measurements do not affect the results of a run. training/monitor turns them into metrics. Read
unit_gather.py first.
"""
