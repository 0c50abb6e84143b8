"""Models: families built from megatron-core blocks, and the units of their weights.

Nothing here depends on the optimizers, checkpoints or process groups of a run. Start with
families.py, the table of families; units.py and decoder_units.py declare the matrices of a model
without the engine; dense.py, gemma2.py and moe.py build it.
"""
