"""The numbered tables and figures of the papers, with commands that reproduce them and our results.

catalogue.py reads the entries of papers.yaml, page.py writes docs/papers.md, and scripts/paper.py
runs the commands.
"""
