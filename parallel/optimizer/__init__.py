"""The distributed optimizer: owners of matrices, the exchange of sharded matrices, the step.

The mathematics of rules is in spectral/rules. Read distributed_optimizer.py first, then
domain_optimizer.py and unit_transfer.py.
"""
