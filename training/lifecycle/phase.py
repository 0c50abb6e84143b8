"""Names of the parts of a run, as profilers show them."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

Phase = Literal["forward_backward", "optimizer", "monitors", "validation", "checkpoint"]


def phase(name: Phase) -> AbstractContextManager[object]:
    """Context of one part: a range in the traces of `torch.profiler`, next to nothing without one.
    A step begins with forward_backward."""
    return torch.profiler.record_function(name)
