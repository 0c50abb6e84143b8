"""Checkpoints of weights alone, made by scripts: imported ones and averages."""
