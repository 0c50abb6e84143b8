"""Command-line tools, which may import every package; no package imports them.

Each .py file except command.py (shared code) is a command; folders contain the commands' parts.
"""
