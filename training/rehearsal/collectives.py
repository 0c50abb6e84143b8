"""One collective, send or receive as a rank calls it."""

from dataclasses import dataclass

Splits = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """What a rank asks of a process group; what must be the same on its ranks, or fit.

    group     global ranks of the group, in its order
    channel   name of the group: several may have the same ranks
    kind      all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier, send, receive
    dtype     of the elements
    numel     elements of the larger side: of the whole buffer of gathers and scatters
    size      bytes that this rank sends
    on_device whether the tensors are the device's
    detail    operation of a reduction, or root of a broadcast
    peer      global rank of the other side of a send or receive
    batch     number of the batch that a send or receive is part of, None by itself
    out, into elements that go to each rank of the group, and come from it, of an all-to-all
    place     where it is called
    step      in which, from 1 on; 0 before the first
    phase     part of the run in which
    """

    group: tuple[int, ...]
    channel: str
    kind: str
    dtype: str
    numel: int
    size: int
    on_device: bool
    detail: str = ""
    peer: int | None = None
    batch: int | None = None
    out: Splits = ()
    into: Splits = ()
    place: str = "?"
    step: int = 0
    phase: str = ""
