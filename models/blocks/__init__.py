"""Modules that our layer specs give Megatron, and the functions that they compute.

No file here depends on a family or a whole model. Start with attention.py and norm.py.
"""
