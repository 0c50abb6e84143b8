"""Metrics of weights, gradients, updates and activations, every few steps.

Only expert_balance.py changes a run: it updates the expert bias. Start with monitors.py.
"""
