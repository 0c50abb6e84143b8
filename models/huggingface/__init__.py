"""Models in the format of transformers: classes, config.json, names and layouts of weights.

Nothing here reads or writes files; scripts/huggingface/ does. Start with architectures.py.
"""
