"""Ranks and what they say to each other: process groups, counted collectives, agreement on the
host, streams, and megatron-core on a host without CUDA.

Nothing here knows a parameter or a matrix. Start with groups.py.
"""
