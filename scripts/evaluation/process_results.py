"""Functions called by lm-eval for the tasks that local_text.py writes.

Byte counts exclude end-of-document tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[float, float]
"""A document's log-likelihood and its size in bytes."""


def process_results(doc: Mapping[str, Any], results: Sequence[float]) -> dict[str, Pair]:
    """Return the same pair for each metric, by name: the document's log-likelihood and size in
    bytes."""
    (likelihood,) = results
    pair = (likelihood, doc["bytes"])
    names = ("bits_per_byte", "byte_perplexity")
    return {name + end: pair for name in names for end in ("", "_standard_error")}


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


def error_of_perplexity(items: Sequence[Pair]) -> float:
    """Return the standard error of byte perplexity, to first order."""
    mean = sum(likelihood for likelihood, _ in items) / sum(size for _, size in items)
    return math.exp(-mean) * math.log(2) * error_of_bits(items)
