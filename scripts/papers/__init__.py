"""The numbered tables and figures of the papers, each with the commands that reproduce it and our
results.

papers.yaml contains the entries: catalogue.py reads them, page.py writes docs/papers.md, and
scripts/paper.py runs the commands.
"""
