"""Destinations of a run's metrics: metrics.jsonl, the console, Weights & Biases, TensorBoard.

These files only write metrics that are computed elsewhere. Start with log_lines.py.
"""
