"""Communication between ranks: process groups, collectives that count bytes sent, agreement between
hosts, and CPU-only support for megatron-core.

The package is independent of parameters and matrices. Read groups.py first.
"""
