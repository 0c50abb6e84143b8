"""Parameter and gradient storage: flat buckets, their shards, and the units in them.

The package is independent of update rules and matrix owners. Read bucket_layout.py first, then
domain_model.py.
"""
