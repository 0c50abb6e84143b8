"""Ranks and their communication: process groups, counted collectives, agreement between hosts,
and megatron-core on a host without CUDA.

The package does not depend on parameters or matrices. Read groups.py first.
"""
