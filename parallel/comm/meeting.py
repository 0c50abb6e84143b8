"""How the ranks of one attempt of a job find each other in a store that earlier attempts have used.

torchrun keeps its store when it starts ranks again, with the addresses of those that are gone, and
its count of restarts is not the same on every node. So ranks agree on a name that is new.
"""

import time
import uuid
from typing import Final

from torch.distributed.distributed_c10d import Store

PAUSE: Final = 0.05
"""Seconds between looks into the store."""


def meet(store: Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Return a name that the ranks of this attempt share, and no others.

    Rank 0 answers the greeting of every rank with the name, and each rank thanks it for that: who
    has greeted in an attempt that is over never does.

    Raises:
        TimeoutError: not all ranks came in time.
    """
    mine, end = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    if rank > 0:
        while not store.check([f"answer/{mine}"]):
            # Again and again, as a rank of an earlier attempt may still have written its own.
            store.set(f"greeting/{rank}", mine)
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank} had no answer of rank 0 in {timeout_seconds:g} s")
            time.sleep(PAUSE)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"thanks/{name}/{rank}", "")
        return name
    missing, answered = set(range(1, size)), set()
    while missing:
        for other in sorted(missing):
            if not store.check([f"greeting/{other}"]):
                continue
            greeting = store.get(f"greeting/{other}")
            if greeting not in answered:
                store.set(f"answer/{greeting.decode()}", mine)
                answered.add(greeting)
            elif store.check([f"thanks/{mine}/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > end:
            first = ", ".join(map(str, sorted(missing)[:8]))
            raise TimeoutError(
                f"{len(missing)} of {size} ranks did not come in {timeout_seconds:g} s: {first}"
            )
        if missing:
            time.sleep(PAUSE)
    return mine
