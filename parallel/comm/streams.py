"""Independent work on parallel streams of a GPU, sequential on a CPU."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")

STREAMS = 4


class Streams:
    """Streams for work that does not depend on each other.

    Small stacks of small matrices leave most of a GPU idle, so item i goes to stream `i % STREAMS`.
    The streams start after the current one, which then waits for all that were used; so the whole
    can be recorded as a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [
            torch.cuda.Stream(device) for _ in range(STREAMS if device.type == "cuda" else 0)
        ]

    def spread(self, items: Sequence[Item]) -> Iterator[Item]:
        """Yield the items, each while its stream is the current one.

        Later work on the stream that is current now sees the results.
        """
        if not self.streams or len(items) < 2:
            yield from items
            return
        current = torch.cuda.current_stream()
        for i, item in enumerate(items):
            stream = self.streams[i % len(self.streams)]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                yield item
        # A stream without an item is not part of a capture, so a capture must not wait for it.
        for stream in self.streams[: len(items)]:
            current.wait_stream(stream)
