"""Memory of parameters and gradients: flat buckets, their shards, and units in them.

Nothing here depends on update rules or owners of matrices. Start with bucket_layout.py, then
domain_model.py.
"""
