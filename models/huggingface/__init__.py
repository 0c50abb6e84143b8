"""Models in Hugging Face format: transformers classes, config.json, weight names and layouts.

Files are read and written by scripts/huggingface/, not here. Start with architectures.py.
"""
