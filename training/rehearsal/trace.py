"""Count a rank's launches, collectives and host syncs in each part of a run."""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from parallel.plan.devices import Device, Work, collective_seconds, launch_seconds
from spectral.ieee_products import is_ieee
from training.rehearsal.program import call_site
from training.rehearsal.stream_order import Part, StreamOrder


@dataclass
class Counts:
    """Sums over a part of a run. A place is the text `name at file:line`.

    launches            number of kernels (including Triton kernels), copies and fills, excluding
                        collectives
    collective_bytes    bytes sent by this rank
    host_reads          number of host syncs to read a value, by place
    synchronizations    number of other host syncs, by place
    kernels             number of launches, by name
    kernel_seconds      estimated time of launches in seconds
    sending             estimated time of collectives in seconds, by kind: activations, gradients,
                        weights, exchange (between owners and shards)
    peak_memory_bytes   peak memory in this part
    flops               FLOPs of launches
    elementwise_bytes   bytes moved by launches without FLOPs
    """

    launches: int = 0
    triton_launches: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    kernel_seconds: float = 0.0
    sending: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    host_reads: Counter[str] = field(default_factory=Counter)
    synchronizations: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    elementwise_bytes: float = 0.0
    flops: float = 0.0

    @property
    def modelled_seconds(self) -> float:
        """Estimated time in seconds of all launches and collectives if they run one after the
        other."""
        return self.kernel_seconds + sum(self.sending.values())

    @property
    def exposed_seconds(self) -> float:
        """Estimated time in seconds without gradient reductions and weight gathers, which overlap
        with other work."""
        hidden = self.sending.get("gradients", 0.0) + self.sending.get("weights", 0.0)
        return self.modelled_seconds - hidden

    def add(self, other: "Counts", times: float = 1) -> "Counts":
        """Return the sum of these counts and `times` * `other`.

        The peak memory of `other` is only included if `times` > 0.
        """
        total: Counts = merged(self, other, lambda a, b: a + times * b)
        peak = other.peak_memory_bytes if times > 0 else 0
        total.peak_memory_bytes = max(self.peak_memory_bytes, peak)
        return total

    def as_dict(self) -> dict[str, float]:
        """Return the counts as the values to write to JSON."""
        return {
            "launches": self.launches,
            "triton_launches": self.triton_launches,
            "collectives": self.collectives,
            "collective_bytes": self.collective_bytes,
            "host_reads": self.host_reads.total(),
            "synchronizations": self.synchronizations.total(),
            "modelled_seconds": self.modelled_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def merged(one: Any, other: Any, number: Callable[[float, float], float]) -> Any:
    """Combine two values of the same type. Numbers are combined by `number`; records and mappings
    are combined entry by entry. Zeros in counters are dropped."""
    if isinstance(one, Counter):
        return +Counter({key: round(number(one[key], other[key])) for key in {*one, *other}})
    if isinstance(one, dict):
        return {
            key: merged(one.get(key, type(v)()), other.get(key, type(v)()), number)
            for key, v in {**one, **other}.items()
        }
    if isinstance(one, int | float):
        value = number(one, other)
        return round(value) if isinstance(one, int) else value
    values = {
        f.name: merged(getattr(one, f.name), getattr(other, f.name), number) for f in fields(one)
    }
    return type(one)(**values)


DEFAULT_STREAM = 0
SETUP = "setup"
STEP = "forward_backward"
OPTIMIZER = "optimizer"
PHASES = (STEP, OPTIMIZER, "monitors", "validation", "checkpoint")
"""Names that training/step.py and loop.py pass to `record_function`. The name `STEP` marks the
start of a step."""
MATHEMATICS = (OPTIMIZER, "monitors")
"""Phases whose float32 matmuls must use IEEE float32, regardless of the precision of the forward
pass."""


class CaptureError(RuntimeError):
    """Raised for calls that CUDA does not permit during graph capture."""


Splits = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A call of a process group. Some of the fields must be equal or must match on all ranks of the
    group.

    group     global ranks of the group, in group order
    channel   name of the group; several groups may have the same ranks
    kind      all_reduce, all_gather, reduce_scatter, all_to_all, send, receive, or the name of an
              exchange of plain values
    dtype     dtype of the elements
    numel     number of elements; for gathers and scatters, of the whole buffer
    size      bytes sent by this rank
    on_device whether the tensors are on the device
    detail    reduction operation
    peer      global rank of the other side of a send or receive
    batch     batch number of a send or receive; None outside a batch
    out, into in an all-to-all, number of elements sent to and received from each rank of the group
    place     source line of the call
    step      step of the call, counted from 1; 0 before the first step
    phase     part of the run that makes the call
    waits     whether the current stream waits for the call to complete
    after     numbers of the calls that the current stream has waited for since the previous call
    """

    group: tuple[int, ...]
    channel: str
    kind: str
    dtype: str
    numel: int
    size: int
    on_device: bool
    detail: str = ""
    peer: int | None = None
    batch: int | None = None
    out: Splits = ()
    into: Splits = ()
    place: str = "?"
    step: int = 0
    phase: str = ""
    waits: bool = False
    after: Splits = ()


ROUNDING = 512
"""PyTorch's allocator rounds memory up to a multiple of this number of bytes."""


class Allocations:
    """Tracks each storage from its first use until the host frees it.

    live, peak   current bytes, and peak bytes since `peak` was reset
    pools        peak bytes in the memory pool of each stream. PyTorch's allocator uses the pool of
                 the current stream, and other streams cannot reuse the memory in this pool
    """

    def __init__(self, order: StreamOrder) -> None:
        """`order` is notified of new and freed storages."""
        self.live = 0
        self.peak = 0
        self.pools: Counter[int] = Counter()
        self._in_pool: Counter[int] = Counter()
        self._order = order
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def storage(self, tensor: Tensor, stream: int) -> int:
        """Return the id of a tensor's storage. The size of the storage is added to `live` on first
        use, and subtracted from `live` when the storage is freed. `stream` is the current
        stream."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known:
            return number
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING

        def gone(_: object) -> None:
            del self._known[number]
            self.live -= size
            self._in_pool[stream] -= size
            self._order.free(number)

        self._known[number] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
        self._in_pool[stream] += size
        self.pools[stream] = max(self.pools[stream], self._in_pool[stream])
        self._order.allocate(number, stream)
        return number


@dataclass(frozen=True)
class Launch:
    """A launched operation, with the tensors it reads and writes, and its cost."""

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    work: Work
    triton: bool = False

    @classmethod
    def moving(cls, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> "Launch":
        """Create the launch of a kernel without matmuls that accesses each tensor once."""
        return cls(name, reads, writes, Work(sum(size_of(x) for x in (*reads, *writes))))


def size_of(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes. Repeated elements of an expanded tensor count once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())


@dataclass
class Recording:
    """The launches in a captured CUDA graph."""

    counts: Counts = field(default_factory=Counts)
    event: int | None = None  # recorded at the end of capture


class Trace:
    """Records one rank's counts and collectives, and the streams, vector clocks and memory of the
    rank's device."""

    def __init__(self, device: Device, rank: int = 0) -> None:
        self.device = device
        self.rank = rank
        self.order = StreamOrder()
        self.memory = Allocations(self.order)
        self.stream = DEFAULT_STREAM
        self.step = 0
        self.phase = SETUP
        self._now = Counts()
        self._open: list[str] = []
        self.counts: dict[tuple[int, str], Counts] = {(0, SETUP): self._now}
        self.calls: list[Call] = []
        self.waited: list[int] = []  # indices of calls waited for since the last call
        self.marks: dict[int, list[Counts]] = {}  # by step, at the start of each forward pass
        self.muted = False  # True while launches must not be counted
        self.imprecise: set[str] = set()  # float32 matmuls of the optimizer that run in TF32
        self.recording: Recording | None = None
        self.batch: int | None = None  # number of the current batch of sends and receives
        self.numbers = itertools.count(1)  # numbers of streams and events
        self.moved: Callable[[], None] = lambda: None  # called when a part of the run starts

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Context manager to count work as part `name` of the run.

        Work after the end of an outermost context also counts as part `name`, until the next
        context starts. Names not in `PHASES` are ignored.
        """
        if name not in PHASES:
            yield
            return
        if name == STEP:
            self.step += 1
        self._open.append(name)
        self._switch(name)
        yield
        self._open.pop()
        if self._open:
            self._switch(self._open[-1])

    def mark(self) -> None:
        """Record the start of a forward pass."""
        self.marks.setdefault(self.step, []).append(Counts().add(self._now))
        self.moved()

    def _switch(self, name: str) -> None:
        self.keep_peak()
        self.memory.peak = self.memory.live
        self.phase = name
        self._now = self.counts.setdefault((self.step, name), Counts())
        self.moved()

    def keep_peak(self) -> None:
        """Save the peak memory of the current part. Call this at the end of the run."""
        self._now.peak_memory_bytes = max(self._now.peak_memory_bytes, self.memory.peak)

    def launch(self, launch: Launch) -> None:
        """Record one launch on the current stream."""
        if self.muted:
            return
        work = launch.work
        float32 = work.operands == "fp32" and work.flops
        if float32 and self.phase in MATHEMATICS and not is_ieee():
            self.imprecise.add(f"{launch.name} at {call_site()} multiplies float32 in TF32")
        read, written = self._parts(launch.reads), self._parts(launch.writes)
        self.order.access(self.stream, read, written, launch.name, call_site())
        now = self._now if self.recording is None else self.recording.counts
        now.launches += work.kernels
        now.triton_launches += work.kernels * launch.triton
        now.kernels[launch.name] += work.kernels
        now.kernel_seconds += launch_seconds(self.device, work, in_graph=self.recording is not None)
        now.elementwise_bytes += 0 if work.flops else work.size
        now.flops += work.flops

    def touch(self, tensors: Iterable[Tensor]) -> None:
        """Track the memory of new tensors that no launch writes."""
        for tensor in tensors:
            self.memory.storage(tensor, self.stream)

    def end_recording(self) -> None:
        """End the capture on the current stream. All other streams of the graph must have joined
        it."""
        assert self.recording is not None
        self.recording.event = next(self.numbers)
        self.order.record(self.recording.event, self.stream)
        self.recording = None

    def replay(self, recording: Recording) -> None:
        """Launch a captured graph on the current stream."""
        if recording.event is not None:
            self.order.wait(recording.event, self.stream)
        graph = Counts().add(recording.counts)
        graph.launches, graph.triton_launches, graph.kernels = 1, 0, Counter({"graph": 1})
        self._now = self.counts[self.step, self.phase] = self._now.add(graph)

    def read(self, name: str) -> None:
        """Record a host sync with the current stream, to read the value or size of a tensor."""
        self._host_waits(self._now.host_reads, name)
        self.order.synchronize(self.stream)

    def synchronize(self, name: str, stream: int | None = None) -> None:
        """Record a host sync with a stream, or with the whole device if `stream` is None."""
        self._host_waits(self._now.synchronizations, name)
        self.order.synchronize(stream)

    def await_event(self, name: str, event: int) -> None:
        """Record a host sync with an event."""
        self._host_waits(self._now.synchronizations, name)
        self.order.host_wait(event)

    def _host_waits(self, counter: Counter[str], name: str) -> None:
        """Count a host sync at the current source line. Raises CaptureError during graph
        capture."""
        if self.recording is not None:
            raise CaptureError(
                f"{name} at {call_site()} is not permitted during CUDA graph capture"
            )
        counter[f"{name} at {call_site()}"] += 1

    def call(
        self, call: Call, reads: Iterable[Tensor], writes: Iterable[Tensor], stream: int
    ) -> None:
        """Record a collective on `stream`. Host collectives cost nothing on the device."""
        waits = stream == self.stream or not call.on_device
        self.calls.append(replace(call, waits=waits, after=tuple(self.waited)))
        self.waited.clear()
        if not call.on_device:
            return
        self.order.access(stream, self._parts(reads), self._parts(writes), call.kind, call.place)
        if len(call.group) == 1:
            return
        now = self._now if self.recording is None else self.recording.counts
        now.collectives += 1
        now.collective_bytes += call.size
        ranks = call.group if call.peer is None else (self.rank, call.peer)
        seconds = collective_seconds(self.device, call.kind, call.size, ranks)
        kind = "activations" if self.phase == STEP else "exchange"
        if stream != self.stream and call.place.startswith("parallel/"):
            kind = {"reduce_scatter": "gradients", "all_gather": "weights"}.get(call.kind, kind)
        now.sending[kind] = now.sending.get(kind, 0.0) + seconds

    def _parts(self, tensors: Iterable[Tensor]) -> list[Part]:
        """Return the byte range of each nonempty tensor, from its first to its last byte, including
        gaps."""
        parts = []
        for x in tensors:
            storage = self.memory.storage(x, self.stream)
            if x.numel():
                extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
                first, size = int(x.storage_offset()), x.element_size()
                parts.append(Part(storage, first * size, (first + extent) * size))
        return parts
