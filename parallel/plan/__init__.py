"""The plan of a run on N ranks, computed without starting the run: placement, sent bytes, memory.

The package uses no device and no process group. Read planner.py first.
"""
