"""Rehearsals, which run a rank's real training code on a simulated GPU, on any machine.

GPU tensors have shapes but no values. Process groups can have any size, but no peers exist. Instead
of calling CUDA, NCCL and Triton, rehearsals record launches, collectives, memory, stream order and
host syncs. No code outside this folder depends on rehearsals. All patches are applied by this
folder and last until the process exits. Read rehearse.py first.
"""
