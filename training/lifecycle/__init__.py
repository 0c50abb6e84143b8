"""Stop requests, saving, heartbeat, pace and folder of a run.

The code in this folder does not access the model's tensors. Read lifecycle.py first.
"""
