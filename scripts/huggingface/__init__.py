"""The parts of scripts/convert_hf.py, which are export, import and their verification.

Start with export.py. models/huggingface/ maps our models and tensors to those of transformers.
"""
