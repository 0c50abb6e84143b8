"""Steps of matrices that several ranks share: owners, and the exchange with owners.

Only `ranks.py` uses torch.distributed; a Megatron-style optimizer with its own storage and
collectives can use placement and exchange too. Start with `shared_matrices.py`.
"""
