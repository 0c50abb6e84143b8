"""Command-line tools. They may import any package, but no package may import them.

Every .py file is a command, except command.py, which holds shared code. Subfolders hold the modules
that the commands are made of.
"""
