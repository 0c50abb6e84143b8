"""Independent work on parallel streams of a GPU, sequential on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import torch

Item = TypeVar("Item")

STREAMS: Final = 4

LARGE: Final = 1 << 21
"""Elements of matrices that fill a GPU by themselves: a product of 128 x 128 has 128 tiles."""


class Streams:
    """Streams for work that does not depend on each other.

    Small stacks of small matrices leave most of a GPU idle, so they take turns on the streams,
    which start after what the current one has done and which it waits for at the end; so the whole
    can be recorded as a CUDA graph. Large ones stay on the current stream: on another they gain
    nothing, and PyTorch's allocator would keep a pool of their scratch for each.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [
            torch.cuda.Stream(device) for _ in range(STREAMS if device.type == "cuda" else 0)
        ]

    def spread(self, items: Sequence[Item], elements: Callable[[Item], int]) -> Iterator[Item]:
        """Yield the items, of so many elements of matrices, each while its stream is the current
        one.

        Later work on the stream that is current now sees the results.
        """
        if not self.streams or len(items) < 2:
            yield from items
            return
        current = torch.cuda.current_stream()
        began = current.record_event()
        used = 0
        for item in items:
            if elements(item) >= LARGE:
                yield item
                continue
            stream = self.streams[used % len(self.streams)]
            used += 1
            stream.wait_event(began)
            with torch.cuda.stream(stream):
                yield item
        # A stream without an item is not part of a capture, so a capture must not wait for it.
        for stream in self.streams[:used]:
            current.wait_stream(stream)
