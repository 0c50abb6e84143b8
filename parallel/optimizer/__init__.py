"""The distributed optimizer: matrix owners, the exchange of sharded matrices, the step.

The math of the update rules is in spectral/rules. Read distributed_optimizer.py first, then
domain_optimizer.py and unit_transfer.py.
"""
