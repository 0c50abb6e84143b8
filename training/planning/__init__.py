"""The output of a dry run: the plan on one screen, whether it fits, and remedies.

Start with plan_commands.py.
"""
