"""Which ranks still answer when a collective has failed.

They meet in the store in which they found each other at the start, as no process group is whole.
"""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from threading import Thread
from typing import Final

from torch.distributed.distributed_c10d import Store

PATIENCE: Final = 5.0
"""Seconds in which every rank that waited in the same collective has failed as well."""


def sign_in(store: Store, rank: int) -> None:
    """Leave this rank's host name for `absent`."""
    store.set(f"host/{rank}", socket.gethostname())


def absent(store: Store, rank: int, size: int) -> dict[int, str]:
    """Return the host of each rank that does not call this within `PATIENCE` seconds.

    They died, or hang elsewhere than in a collective. A store that stays silent for twice as long
    counts as rank 0, on whose node it is: that node has no power, or no link leads to it. {} if
    the store is gone.
    """
    found: dict[int, str] = {}
    # A call of the store waits for minutes where a link was cut, whatever its time-out is.
    asking = Thread(target=lambda: found.update(_ask(store, rank, size)), daemon=True)
    asking.start()
    asking.join(3 * PATIENCE)
    if asking.is_alive() and rank != 0:
        return {0: os.environ["MASTER_ADDR"]}
    return dict(found)


def _ask(store: Store, rank: int, size: int) -> dict[int, str]:
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{rank}", "")
        time.sleep(PATIENCE)
        return {other: store.get(f"host/{other}").decode() for other in _silent(store, range(size))}
    return {}


def _silent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Return those of `ranks` that have not said that they failed, with few calls if few."""
    if store.check([f"failed/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return _silent(store, ranks[:half]) + _silent(store, ranks[half:])
