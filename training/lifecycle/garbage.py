"""Python's garbage collector, which all ranks run at the same steps.

By itself it starts when enough objects were made, on every rank at another step, and all others
wait for that rank.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

INTERVAL: Final = 10
"""Steps between collections of what was made since the run began."""


@contextlib.contextmanager
def collected_at_steps() -> Iterator[None]:
    """Context in which nothing is collected but by `collect`, and what exists already never is."""
    automatic = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if automatic:
            gc.enable()


def collect(step: int) -> None:
    """Collect after every `INTERVAL`-th step."""
    if step % INTERVAL == 0:
        gc.collect()
