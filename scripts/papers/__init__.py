"""Every numbered table and figure of the papers, with commands that reproduce it and results.

papers.yaml contains all of it; catalogue.py reads it, page.py writes docs/papers.md from it, and
scripts/paper.py runs its commands.
"""
