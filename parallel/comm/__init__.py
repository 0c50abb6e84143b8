"""Ranks and their communication: process groups, counted collectives, agreement between hosts,
and megatron-core on a host without CUDA.

Nothing here depends on a parameter or a matrix. Start with groups.py.
"""
