"""Three sets for runs on a mixture, and the order in which they are read."""

from training.data.order import window_order

SIZES = {"big": 3_000, "middle": 2_000, "small": 1_000}
"""Number of tokens in each set."""
LENGTH = 8
"""Number of tokens per sample."""

Read = list[tuple[str, int]]
"""The set and window of each sample, in read order."""


def windows_of(read: Read, name: str) -> list[int]:
    """Return the windows of a set in read order."""
    return [window for each, window in read if each == name]


def expected(name: str, count: int) -> list[int]:
    """Return the first windows read by a run on this set alone, epoch by epoch."""
    size = (SIZES[name] - 1) // LENGTH
    epochs = range(-(-count // size))
    orders = (window_order(name, size, 7, epoch) for epoch in epochs)
    return [order[i] for order in orders for i in range(size)][:count]
