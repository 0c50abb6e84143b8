"""Three sets for runs on mixtures, and the order in which runs read them."""

from training.data.order import window_order

SIZES = {"big": 3_000, "middle": 2_000, "small": 1_000}
"""Tokens of each set."""
LENGTH = 8
"""Tokens of a sample."""

Read = list[tuple[str, int]]
"""Set and window of each sample, in the order of reading."""


def windows_of(read: Read, name: str) -> list[int]:
    """Return the windows of a set in the order of reading."""
    return [window for each, window in read if each == name]


def expected(name: str, count: int) -> list[int]:
    """Return the first windows that a run on this set alone reads, epoch by epoch."""
    size = (SIZES[name] - 1) // LENGTH
    epochs = range(-(-count // size))
    orders = (window_order(name, size, 7, epoch) for epoch in epochs)
    return [order[place] for order in orders for place in range(size)][:count]
