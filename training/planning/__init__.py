"""Output of a dry run: the plan, a verdict on whether the run fits the GPUs, and remedies.

Read plan_commands.py first.
"""
