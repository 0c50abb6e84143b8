"""Rehearsals: a rank's real training code runs on a simulated GPU, on any machine.

GPU tensors have shapes but no values, and process groups have any size but no peers. Launches,
collectives, memory, stream order and host waits are recorded instead of calling CUDA, NCCL and
Triton. Code outside this folder does not depend on rehearsals. All replacements of functions are
made in this folder and last until the process ends. Start with rehearse.py.
"""
