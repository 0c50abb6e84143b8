"""Command-line tools. They may import every package; no package imports them.

Each .py file is a command, except command.py (shared code); folders contain their parts.
"""
