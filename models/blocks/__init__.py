"""Modules of Megatron's layer specs, and the functions that they compute.

The package does not depend on families or whole models. Read attention.py and norm.py first.
"""
