"""Weights-only checkpoints written by scripts: imports and averages."""
