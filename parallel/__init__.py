"""Everything that must know its rank.

Six wings on five floors; a wing imports those below it, and nothing above (a test holds it):

    plan/       what a run needs on N ranks, without running it          checkpoint/  observe/
    optimizer/  which rank steps which matrix, and how it gets there
    model.py    the model of one rank
    storage/    where every element lies in flat buckets
    comm/       ranks, and what they say to each other

No data, no config and no logging is known here. Start with model.py, then optimizer/optimizer.py.
"""
