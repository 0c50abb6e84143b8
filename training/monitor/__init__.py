"""Figures of weights, gradients, updates and activations on monitored steps.

Nothing here changes a run, but for auto_rule.py, which turns figures into the choice of rules, and
expert_balance.py, which moves the expert bias. Start with monitors.py.
"""
