"""The parts of scripts/convert_hf.py: export, import, and their verification.

What a model of ours is there, and which tensor is which, lies in models/huggingface/. Start with
export.py.
"""
