"""The output of a dry run: the plan, whether it fits the GPUs, and remedies if it does not.

Start with plan_commands.py.
"""
