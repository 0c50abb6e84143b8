"""Destinations of a run's metrics: metrics.jsonl, the console, Weights & Biases, TensorBoard.

No file computes figures of the model. Start with log_lines.py.
"""
