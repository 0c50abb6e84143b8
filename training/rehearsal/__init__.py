"""Rehearsals: a rank's real training code on a simulated GPU, on any machine.

GPU tensors have shapes and no values, process groups have any size and no peers, and calls of CUDA,
NCCL and Triton are recorded: launches, collectives, memory, the order of streams, and waits of the
host. Code outside this folder does not depend on rehearsals; all replacements are made here, for
the life of a process. Start with rehearse.py.
"""
