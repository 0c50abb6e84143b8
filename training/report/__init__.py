"""Destinations of a run's metrics: metrics.jsonl, the console, Weights & Biases, TensorBoard.

Nothing here computes a figure of the model. Start with metrics.py.
"""
