"""Everything around the steps: stop requests, saving, heartbeat, pace and the run folder.

Nothing here touches the model's tensors. Start with lifecycle.py.
"""
