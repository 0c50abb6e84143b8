"""Modules of scripts/study.py: description, runs, search and comparison."""
