"""Rehearsals: a rank's real training code on a pretended GPU, on any machine.

Tensors of the GPU have shapes and no values, process groups have any size and no peers, and what
the code asks of CUDA, NCCL and Triton is written down: launches, collectives, memory, the order of
streams, and where the host waits. Nothing outside this wing knows that it is rehearsed; everything
that is replaced is replaced here, for the life of a process. Start with rehearse.py.
"""
