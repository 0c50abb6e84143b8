"""Models in the format of transformers: classes, config.json, names and layouts of weights.

The package reads and writes no files; scripts/huggingface/ does. Read architectures.py first.
"""
