"""Tasks around the steps: stop requests, saving, heartbeat, pace and the run folder.

No file uses the model's tensors. Start with lifecycle.py.
"""
