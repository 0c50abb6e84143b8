"""Assigns owners to matrices that are shared by several ranks, and exchanges data with the owners.

Only `ranks.py` uses torch.distributed. A Megatron-style optimizer with its own storage and
collectives can use placement and exchange as well. Start with `shared_matrices.py`.
"""
