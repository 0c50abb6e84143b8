"""A replacement for `torch.cuda` that records streams, events and waits."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch

from training.rehearsal.program import put
from training.rehearsal.trace import DEFAULT_STREAM, Recording, Trace


def install(trace: Trace) -> None:
    """Replace the functions and classes of `torch.cuda` until this process exits."""
    index = trace.rank % trace.device.node_size
    things = {**_device(trace, index), **GENERATORS, **_streams(trace, index)}
    for name, thing in things.items():
        put(torch.cuda, name, thing)
    for name, function in GENERATORS.items():
        put(torch.cuda.random, name, function)
    generator = SimpleNamespace(set_state=lambda _: None)  # megatron-core calls set_state
    put(torch.cuda, "default_generators", (generator,) * trace.device.node_size)
    put(torch.cuda.nccl, "version", lambda: (2, 0, 0))  # included in errors of collectives
    put(torch.profiler, "record_function", lambda name, *_: trace.within(name))


Functions = dict[str, Callable[..., Any]]

GENERATORS: Final[Functions] = {
    "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *_, **__: None,
    "manual_seed": lambda _: None,
    "manual_seed_all": lambda _: None,
}


def _device(trace: Trace, index: int) -> Functions:
    device = trace.device
    properties = SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.processors,
        total_memory=device.memory_bytes,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: device.node_size,
        "current_device": lambda: index,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: device.name,
        "get_device_capability": lambda *_: device.capability,
        "get_device_properties": lambda *_: properties,
        "synchronize": lambda *_: trace.synchronize("cuda.synchronize"),
        "is_current_stream_capturing": lambda: trace.recording is not None,
        "max_memory_allocated": lambda *_: trace.memory.peak,
        "max_memory_reserved": lambda *_: trace.memory.peak,
        "empty_cache": lambda: None,
    }


def _streams(trace: Trace, index: int) -> dict[str, Any]:
    """Return replacements for streams, events and CUDA graphs."""

    class Stream:
        """A stream of the simulated device."""

        def __init__(self, *_: Any, stream_id: int | None = None, **__: Any) -> None:
            self.stream_id = next(trace.numbers) if stream_id is None else stream_id
            self.cuda_stream = self.stream_id
            self.device = torch.device("cuda", index)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return self.stream_id

        def wait_event(self, event: "Event") -> None:
            event.wait(self)

        def wait_stream(self, stream: "Stream") -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: "Event | None" = None) -> "Event":
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            trace.synchronize("stream.synchronize", self.stream_id)

    class Event:
        """An event that is recorded on one stream and that other streams can wait for."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.number = next(trace.numbers)

        def record(self, stream: Stream | None = None) -> None:
            trace.order.record(self.number, trace.stream if stream is None else stream.stream_id)

        def wait(self, stream: Stream | None = None) -> None:
            trace.order.wait(self.number, trace.stream if stream is None else stream.stream_id)

        def synchronize(self) -> None:
            trace.await_event("event.synchronize", self.number)

        def elapsed_time(self, other: "Event") -> float:
            return 1.0

    class Graph:
        """A CUDA graph of the launches recorded during its capture."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.recording: Recording | None = None

        def replay(self) -> None:
            assert self.recording is not None, "a graph must be recorded before it is replayed"
            trace.replay(self.recording)

        def reset(self) -> None:
            self.recording = None

    @contextlib.contextmanager
    def on_stream(stream: Stream | None) -> Iterator[Stream | None]:
        before = trace.stream
        trace.stream = before if stream is None else stream.stream_id
        try:
            yield stream
        finally:
            trace.stream = before

    @contextlib.contextmanager
    def record(graph: Graph, *_: Any, stream: Stream | None = None, **__: Any) -> Iterator[None]:
        trace.synchronize("cuda.graph")
        with on_stream(stream):
            trace.recording = graph.recording = Recording()
            try:
                yield
            finally:
                trace.end_recording()

    default = Stream(stream_id=DEFAULT_STREAM)
    return {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": record,
        "stream": on_stream,
        "current_stream": lambda *_: Stream(stream_id=trace.stream),
        "default_stream": lambda *_: default,
    }
