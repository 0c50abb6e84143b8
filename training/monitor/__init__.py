"""Figures of weights, gradients, updates and activations on monitored steps.

Nothing here changes a run, except expert_balance.py, which updates the expert bias. Start with
monitors.py.
"""
