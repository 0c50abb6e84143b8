"""The machine of a run: its device, process groups, environment variables and installed packages.

Nothing in this folder depends on the model or the step. The device and environment are set up
before CUDA is initialized. The run's events and checkpoints include a description of the machine.
Read device.py first, then start.py.
"""
