"""What is trained: model families from megatron-core blocks, and the units of their weights.

Optimizers, checkpoints and process groups of a run are not known here. Start with families.py, the
table of families; units.py and decoder_units.py declare which matrices a model has, without the
engine; dense.py, gemma2.py and moe.py build it.
"""
