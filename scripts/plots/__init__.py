"""Figures and HTML pages for scripts/plot.py."""
