"""Saving and loading the state of model and optimizer, in coordinates that are the same on any
layout.

training/checkpoint manages folders, retention and resuming. Read state.py first.
"""
