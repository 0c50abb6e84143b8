"""Modules of scripts/convert_hf.py: export, import and verification.

Start with export.py. models/huggingface/ maps our models and tensors to those in transformers.
"""
