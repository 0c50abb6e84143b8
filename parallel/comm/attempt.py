"""A name for one attempt of a job, by which its ranks know each other in a store that earlier
attempts have used.

torchrun keeps its store when it starts ranks again, with the addresses of those that are gone, and
its count of restarts is not the same on every node. So the ranks of an attempt agree on a name that
is new. torchrun starts an attempt when all ranks of the one before have ended.
"""

import time
import uuid
from typing import Final

from torch.distributed.distributed_c10d import Store

PAUSE: Final = 0.05
"""Seconds between looks into the store."""


def attempt_name(store: Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Return a name that the ranks of this attempt share, and no others.

    Rank 0 replies to the request of every rank with the name, and each rank acknowledges it: one
    that made its request in an attempt that is over never does.

    Raises:
        TimeoutError: not all ranks came in time.
    """
    mine, end = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    if rank > 0:
        while not store.check([f"reply/{mine}"]):
            # Again and again: it costs little, and a rank that outlives its attempt may write here.
            store.set(f"request/{rank}", mine)
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank} had no reply of rank 0 in {timeout_seconds:g} s")
            time.sleep(PAUSE)
        name = store.get(f"reply/{mine}").decode()
        store.set(f"acknowledged/{name}/{rank}", "")
        return name
    missing, replied = set(range(1, size)), set()
    while missing:
        for other in sorted(missing):
            if not store.check([f"request/{other}"]):
                continue
            request = store.get(f"request/{other}")
            if request not in replied:
                store.set(f"reply/{request.decode()}", mine)
                replied.add(request)
            elif store.check([f"acknowledged/{mine}/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > end:
            first = ", ".join(map(str, sorted(missing)[:8]))
            raise TimeoutError(
                f"{len(missing)} of {size} ranks did not come in {timeout_seconds:g} s: {first}"
            )
        if missing:
            time.sleep(PAUSE)
    return mine
