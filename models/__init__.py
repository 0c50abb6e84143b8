"""Model families built from megatron-core blocks, and the units that make up their weights.

This package does not depend on optimizers, checkpoints or process groups. Start with families.py,
the table of families. units.py and decoder_units.py declare a model's matrices without importing
megatron-core; dense.py and moe.py build the models.
"""
