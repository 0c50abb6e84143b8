"""Communication between ranks: process groups, collectives that count sent bytes, agreement between
hosts, and support of megatron-core on hosts without CUDA.

The package does not depend on parameters or matrices. Read groups.py first.
"""
