"""Independent work side by side on a GPU's streams, one after the other on a CPU."""

from collections.abc import Callable, Sequence

import torch

STREAMS = 4


class Streams:
    """Runs tasks that do not depend on each other.

    On a GPU small batches of small matrices leave most of it idle, so task i goes to stream
    `i % STREAMS`; what follows on the current stream waits for all that were used. Each stream
    begins after the current one and is waited for, so that it may be recorded as a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [
            torch.cuda.Stream(device) for _ in range(STREAMS if device.type == "cuda" else 0)
        ]

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """None; when it returns, later work on the current stream sees what the tasks did."""
        if not self.streams or len(tasks) < 2:
            for task in tasks:
                task()
            return
        current = torch.cuda.current_stream()
        for i, task in enumerate(tasks):
            stream = self.streams[i % len(self.streams)]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                task()
        # One that had no task is not part of a capture, which must not wait for it.
        for stream in self.streams[: len(tasks)]:
            current.wait_stream(stream)
