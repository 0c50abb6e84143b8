"""What a dry run prints: the plan on one screen, whether it fits, and what would be better.

Start with plan_commands.py.
"""
