"""The plan of a run on N ranks, computed without starting the run: placement, sent bytes, memory.

The package does not use devices or process groups. Read planner.py first.
"""
