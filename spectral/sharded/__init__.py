"""Updates matrices that are shared by several ranks: owners, and the exchange with owners.

Only `ranks.py` uses torch.distributed. A Megatron-style optimizer with its own storage and
collectives can use placement and exchange as well. Start with `shared_matrices.py`.
"""
