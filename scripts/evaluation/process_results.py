"""Functions called by lm-eval for the tasks that local_text.py writes.

Byte counts exclude end-of-document tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[float, float]
"""A document's log-likelihood and its size in bytes."""


def process_results(doc: Mapping[str, Any], results: Sequence[float]) -> dict[str, Pair]:
    """Return the document's log-likelihood and size in bytes, for bits per byte and for its
    standard error."""
    (likelihood,) = results
    return dict.fromkeys(
        ("bits_per_byte", "bits_per_byte_standard_error"), (likelihood, doc["bytes"])
    )


def error_of_bits(items: Sequence[Pair]) -> float:
    """Return the standard error of bits per byte, computed for a ratio of two sums over
    documents."""
    if len(items) < 2:
        return math.nan
    total = sum(size for _, size in items)
    ratio = sum(likelihood for likelihood, _ in items) / total
    squares = sum((likelihood - ratio * size) ** 2 for likelihood, size in items)
    n = len(items)
    return math.sqrt(squares * n / (n - 1)) / total / math.log(2)
