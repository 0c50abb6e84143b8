"""Command-line tools. They may import every package; no package imports them.

Each .py file except command.py (shared code) is a command. Folders contain the commands' parts.
"""
