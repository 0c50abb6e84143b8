"""Modules of scripts/evaluate.py."""
