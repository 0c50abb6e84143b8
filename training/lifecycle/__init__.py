"""Tasks around the steps: stop requests, saving, heartbeat, pace, and the run folder.

Nothing here touches a tensor of the model. Start with lifecycle.py.
"""
