"""Steps of matrices that several ranks share: owners, and the exchange with owners.

Only `ranks.py` uses torch.distributed. A Megatron-style optimizer with its own storage and
collectives can also use placement and exchange. Start with `shared_matrices.py`.
"""
