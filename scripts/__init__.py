"""Command-line tools. They may import every package; no package imports them.

Each .py file is a command; command.py contains their shared code, the folders their parts.
"""
