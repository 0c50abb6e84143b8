"""Three sets of which runs read mixtures, and the order in which each is read."""

from training.data.order import window_order

SIZES = {"big": 3_000, "middle": 2_000, "small": 1_000}
"""Tokens of each set."""
LENGTH = 8
"""Tokens of a sample."""

Read = list[tuple[str, int]]
"""Set and window of each sample, in the order in which a run has read them."""


def windows_of(read: Read, name: str) -> list[int]:
    """The windows of a set in the order in which they were read."""
    return [window for each, window in read if each == name]


def expected(name: str, count: int) -> list[int]:
    """The first windows of a set, epoch after epoch, as a run that reads nothing else has them."""
    size = (SIZES[name] - 1) // LENGTH
    epochs = range(-(-count // size))
    orders = (window_order(name, size, 7, epoch) for epoch in epochs)
    return [order[place] for order in orders for place in range(size)][:count]
