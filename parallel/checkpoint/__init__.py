"""Saves and loads model and optimizer state, in layout-independent coordinates.

training/checkpoint manages folders, retention and resuming. Read state.py first.
"""
