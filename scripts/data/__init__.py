"""Modules of scripts/prepare_data.py."""
