"""The output of a dry run: the plan, whether it fits the GPUs, and remedies.

Start with plan_commands.py.
"""
