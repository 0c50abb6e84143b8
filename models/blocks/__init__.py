"""Modules for Megatron's layer specs, and the functions that these modules compute.

This package does not depend on families or whole models. Start with attention.py and norm.py.
"""
