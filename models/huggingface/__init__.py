"""Models in the format of transformers: classes, config.json, names and layouts of weights.

Files are read and written by scripts/huggingface/, not here. Read architectures.py first.
"""
