"""Steps of matrices that several ranks share: who owns which, and how it gets there and back.

Only `ranks.py` knows torch.distributed; placement and exchange are also those of a Megatron-style
optimizer, which brings its own storage and collectives. Start with `shared_matrices.py`.
"""
