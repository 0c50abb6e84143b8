"""All code that depends on the rank.

A folder only imports from folders listed below it, which a test enforces:

    plan/       memory, traffic and load of a run on N ranks     checkpoint/  observe/
    optimizer/  matrix owners, the exchange, the optimizer step
    model.py    one rank's model
    storage/    flat parameter and gradient buckets
    comm/       process groups and collectives

The package is independent of data, configs and logging. Read model.py first, then
optimizer/distributed_optimizer.py. docs/architecture.md follows one training step through the
files.
"""
