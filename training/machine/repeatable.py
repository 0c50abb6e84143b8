"""Results that repeat to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def repeatable() -> Iterator[None]:
    """Context in which PyTorch takes deterministic kernels, as before afterwards.

    An operation without one warns and goes on: a run must not end in a step that the tests, without
    a GPU, never took. To set it loads torch's compiler, which takes seconds.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing reads memory that it has not written; filling it costs a pass.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
