"""Metrics of weights, gradients, updates and activations, computed every few steps.

Only expert_balance.py affects training: it updates the expert bias. Read monitors.py first.
"""
