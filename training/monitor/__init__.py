"""Figures of weights, gradients, updates and activations in monitored steps.

Only expert_balance.py changes a run: it updates the expert bias. Start with monitors.py.
"""
