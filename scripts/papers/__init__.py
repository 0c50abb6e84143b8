"""The papers' numbered tables and figures, with our results and the commands to reproduce them.

catalogue.py reads the entries in papers.yaml, page.py writes docs/papers.md, and scripts/paper.py
runs the commands.
"""
