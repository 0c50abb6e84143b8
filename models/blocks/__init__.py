"""Modules in the layer specs for Megatron, and the functions that they compute.

No file here depends on a family or a whole model. Start with attention.py and norm.py.
"""
