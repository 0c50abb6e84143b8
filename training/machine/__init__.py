"""The machine of a run: its device, environment variables, and installed packages.

Nothing here depends on a model or a step. All facts are determined before CUDA starts, and written
to the run's events and checkpoints. Start with device.py.
"""
