"""Everything that depends on the rank.

Six wings on five floors; a wing imports only those below it, which a test holds:

    plan/       memory, bytes and loads of a run on N ranks      checkpoint/  observe/
    optimizer/  the owner of each matrix, the exchange, the step
    model.py    the model of one rank
    storage/    where every element is in flat buckets
    comm/       process groups and collectives

No data, no config and no logging is known here. Start with model.py, then
optimizer/distributed_optimizer.py; docs/architecture.md follows one training step through the
files.
"""
