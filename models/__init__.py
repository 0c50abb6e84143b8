"""Families of models, built from megatron-core blocks, and the units of their weights.

The package does not depend on a run's optimizers, checkpoints or process groups. Read families.py,
the table of families, first. units.py and decoder_units.py declare a model's matrices without
importing megatron-core. dense.py, gemma2.py and moe.py build models.
"""
