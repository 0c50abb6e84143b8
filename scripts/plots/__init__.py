"""Figures and pages of scripts/plot.py."""
