"""The parts of scripts/convert_hf.py: export, import, and their verification.

models/huggingface/ states what a model is there, and which tensor is which. Start with
export.py.
"""
