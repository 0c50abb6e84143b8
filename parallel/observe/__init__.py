"""Measurements for monitors of a run: whole matrices, activations, gradients of micro-batches.

Measurements do not change the results of a run. training/monitor computes metrics from them. Read
unit_gather.py first.
"""
