"""Communication between ranks: process groups, collectives that count sent bytes, agreement between
hosts, and megatron-core on a host without CUDA.

The package does not depend on parameters or matrices. Read groups.py first.
"""
