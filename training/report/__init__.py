"""Write a run's metrics to metrics.jsonl, the console, Weights & Biases and TensorBoard.

The metrics themselves are computed elsewhere. Read log_lines.py first.
"""
