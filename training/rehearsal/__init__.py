"""Rehearsals: a rank's real training code on a simulated GPU, on any machine.

GPU tensors have shapes but no values, and process groups have any size but no peers. Calls of CUDA,
NCCL and Triton are recorded: launches, collectives, memory, the order of streams, and waits of the
host. Code outside this folder does not depend on rehearsals. This folder makes all replacements;
they last for the life of a process. Start with rehearse.py.
"""
