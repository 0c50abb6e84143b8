"""Results that repeat to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Context in which PyTorch takes deterministic kernels if `wanted`, as before otherwise.

    An operation without one warns and goes on: a run must not end in a step that the tests, without
    a GPU, never took.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Nothing reads memory that it has not written; filling it costs a pass.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
