"""The numbered tables and figures of the papers, with our results and commands to reproduce them.

catalogue.py reads the entries of papers.yaml, page.py writes docs/papers.md, and scripts/paper.py
runs the commands.
"""
