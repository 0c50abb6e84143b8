"""Plans a run on N ranks without starting it: placement, communication volume, memory.

The package uses neither devices nor process groups. Read planner.py first.
"""
