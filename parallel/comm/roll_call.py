"""Which ranks still answer when a collective has failed.

They meet in the store in which they found each other at the start, as no process group is whole.
"""

import contextlib
import socket
import time
from typing import Final

from torch.distributed.distributed_c10d import Store

PATIENCE: Final = 5.0
"""Seconds in which every rank that waited in the same collective has failed as well."""


def sign_in(store: Store, rank: int) -> None:
    """Leave this rank's host name for `absent`."""
    store.set(f"host/{rank}", socket.gethostname())


def absent(store: Store, rank: int, size: int) -> dict[int, str]:
    """Return the host of each rank that does not call this within `PATIENCE` seconds.

    They died, or hang elsewhere than in a collective. {} if the store cannot be reached.
    """
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{rank}", "")
        time.sleep(PATIENCE)
        silent = [other for other in range(size) if not store.check([f"failed/{other}"])]
        return {other: store.get(f"host/{other}").decode() for other in silent}
    return {}
