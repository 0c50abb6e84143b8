"""The distributed optimizer: the owner of each matrix, the exchange of cut matrices, the step.

The mathematics of a rule is in spectral/rules. Start with distributed_optimizer.py, then
domain_optimizer.py and unit_transfer.py.
"""
