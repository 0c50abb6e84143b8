"""Where the elements of parameters and gradients lie: flat buckets, their shards, units in them.

Nothing here knows an update rule or an owner of a matrix. Start with bucket_layout.py, then
buffers.py.
"""
