"""All code that depends on the rank.

A folder imports only from folders in lower lines, which a test checks:

    plan/       memory, bytes and loads of a run on N ranks      checkpoint/  observe/
    optimizer/  the owner of each matrix, the exchange, the step
    model.py    the model of one rank
    storage/    positions of all elements in flat buckets
    comm/       process groups and collectives

The package does not depend on data, configs or logging. Read model.py first, then
optimizer/distributed_optimizer.py. docs/architecture.md follows one training step through the
files.
"""
