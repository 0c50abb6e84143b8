"""The parts of scripts/convert_hf.py: export, import, and their verification.

models/huggingface/ maps models and tensors to those of transformers. Start with export.py.
"""
