"""Memory of parameters and gradients: flat buckets, their shards, and units in them.

The package does not depend on update rules or owners of matrices. Read bucket_layout.py first, then
domain_model.py.
"""
