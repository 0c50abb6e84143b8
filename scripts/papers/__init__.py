"""Every numbered table and figure of the papers: what it shows, how to redo it, what came out.

papers.yaml is the one place where this is written; catalogue.py reads it, page.py makes
docs/papers.md of it, and scripts/paper.py runs what it says.
"""
