"""The machine that a run is on: its device, what the environment must say, and what is installed.

Nothing here knows a model or a step. All of it is settled before CUDA starts, and written to the
run's events and checkpoints. Start with device.py.
"""
