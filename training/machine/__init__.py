"""The machine of a run: its device, process groups, environment variables and installed packages.

No file depends on a model or a step. The device and the environment are set before CUDA starts.
Events and checkpoints of the run describe the machine. Start with device.py, then start.py.
"""
