"""The plan of a run on N ranks, computed without running it: placement, sent bytes, memory.

Nothing here touches a device or a process group. Start with planner.py.
"""
