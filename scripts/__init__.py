"""Command-line tools. They may import every package; no package imports them.

Each .py file is a command, and command.py holds what they share; the folders hold their parts.
"""
