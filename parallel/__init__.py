"""Everything that depends on the rank.

Folders on several levels; each imports only from lower levels, which a test checks:

    plan/       memory, bytes and loads of a run on N ranks      checkpoint/  observe/
    optimizer/  the owner of each matrix, the exchange, the step
    model.py    the model of one rank
    storage/    positions of all elements in flat buckets
    comm/       process groups and collectives

Nothing here depends on data, configs or logging. Start with model.py, then
optimizer/distributed_optimizer.py; docs/architecture.md follows one training step through the
files.
"""
