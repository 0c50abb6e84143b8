"""Independent work on parallel streams of a GPU, sequential on a CPU."""

from collections.abc import Callable, Sequence

import torch

STREAMS = 4


class Streams:
    """Runs tasks that do not depend on each other.

    Small stacks of small matrices leave most of a GPU idle, so task i goes to stream `i % STREAMS`.
    The streams start after the current one, which then waits for all that were used; so the whole
    can be recorded as a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = [
            torch.cuda.Stream(device) for _ in range(STREAMS if device.type == "cuda" else 0)
        ]

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run the tasks; later work on the current stream sees their results."""
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
        # A stream without a task is not part of a capture, so a capture must not wait for it.
        for stream in self.streams[: len(tasks)]:
            current.wait_stream(stream)
