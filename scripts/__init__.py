"""Command-line tools. Scripts may import any package, but no package may import a script.

Every .py file here is a command, except command.py, which contains shared code. Subfolders hold the
modules that implement the commands.
"""
