"""What a config needs and does on N ranks, computed without running it: placement, bytes, memory.

Nothing here touches a device or a process group. Start with planner.py.
"""
