"""Detect unordered memory accesses across streams.

Each stream has a vector clock. The vector clock of a stream S stores, for every stream, the last
access that is known to complete before the next work on S. An event passes the clock of the
recording stream to the waiting stream. If two streams access the same bytes and one of the accesses
is a write, the clocks must order the two accesses.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

Clock = dict[int, int]
"""Maps each stream to the number of its last access that is known to have completed."""


@dataclass(frozen=True)
class Part:
    """The bytes `[first, last)` of a storage."""

    storage: int
    first: int
    last: int

    def meets(self, other: "Part") -> bool:
        """Return whether this part overlaps `other`."""
        return self.first < other.last and other.first < self.last

    def covers(self, other: "Part") -> bool:
        """Return whether this part contains `other`."""
        return self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class Access:
    """One memory access: stream, number, operation and source line."""

    stream: int
    number: int
    name: str
    place: str


@dataclass
class Memory:
    """State of one storage: the stream that allocated it, and the accesses to its parts. An access
    is dropped once a later access covers all bytes of the earlier access."""

    stream: int
    writes: list[tuple[Part, Access]] = field(default_factory=list)
    reads: list[tuple[Part, Access]] = field(default_factory=list)


class StreamOrder:
    """Tracks the order of all accesses in a process. `findings` describes the pairs of accesses
    that are not ordered."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}  # accesses the host has waited for
        self._events: dict[int, Clock] = {}
        self._memory: dict[int, Memory] = {}
        self._number = 0

    def clock(self, stream: int) -> Clock:
        """Return the clock of a stream. A new stream starts after all work the host has waited
        for."""
        return self._clocks.setdefault(stream, dict(self._host))

    def record(self, event: int, stream: int) -> None:
        """Record the current clock of `stream` in `event`."""
        self._events[event] = dict(self.clock(stream))

    def wait(self, event: int, stream: int) -> None:
        """Make `stream` wait for `event`. Waiting for an event that was never recorded is a
        no-op."""
        self._join(self.clock(stream), self._events.get(event, {}))

    def synchronize(self, stream: int | None = None) -> None:
        """Record that the host waits for `stream`, or for all streams if `stream` is None. All
        later work is ordered after the work that the host waits for."""
        streams = [*self._clocks] if stream is None else [stream]
        for each in streams:
            self._join_all(self.clock(each))

    def host_wait(self, event: int) -> None:
        """Record that the host waits for `event`. All later work is ordered after the event."""
        self._join_all(self._events.get(event, {}))

    def _join_all(self, waited: Clock) -> None:
        """Order all streams, including new ones, after the work the host has waited for."""
        for clock in (self._host, *self._clocks.values()):
            self._join(clock, waited)

    def allocate(self, storage: int, stream: int) -> None:
        """Start tracking memory that the host has allocated while `stream` was the current
        stream."""
        self._memory[storage] = Memory(stream)

    def access(
        self, stream: int, reads: Iterable[Part], writes: Iterable[Part], name: str, place: str
    ) -> None:
        """Record one launch on `stream`."""
        self._number += 1
        clock = self.clock(stream)
        now = Access(stream, self._number, name, place)
        for part in reads:
            memory = self._memory[part.storage]
            self._check(memory.writes, part, now, "reads memory without waiting for")
            memory.reads = [
                each
                for each in memory.reads
                if each[1].stream != stream or not part.covers(each[0])
            ]
            memory.reads.append((part, now))
        for part in writes:
            memory = self._memory[part.storage]
            self._check(memory.writes, part, now, "writes memory without waiting for")
            self._check(memory.reads, part, now, "overwrites memory without waiting for")
            memory.reads = [each for each in memory.reads if not part.covers(each[0])]
            memory.writes = [each for each in memory.writes if not part.covers(each[0])]
            memory.writes.append((part, now))
        clock[stream] = self._number

    def free(self, storage: int) -> None:
        """Stop tracking memory freed by the host.

        The stream that allocated the memory may reuse it. Therefore, the accesses of all other
        streams must be ordered before the next work on the allocating stream.
        """
        memory = self._memory.pop(storage)
        now = Access(memory.stream, self._number, "memory reuse", "the allocator")
        for uses in (memory.writes, memory.reads):
            self._check(uses, None, now, "may begin before the end of")

    def _check(
        self, before: list[tuple[Part, Access]], part: Part | None, now: Access, what: str
    ) -> None:
        """Record each access in `before` that overlaps `part` but is not ordered before `now`.

        If `part` is None, every access overlaps.
        """
        clock = self.clock(now.stream)
        for other, access in before:
            if access.stream == now.stream or access.number <= clock.get(access.stream, -1):
                continue
            if part is None or part.meets(other):
                self.findings.append(
                    f"{now.name} at {now.place} {what} {access.name} at {access.place}"
                )

    @staticmethod
    def _join(clock: Clock, other: Clock) -> None:
        for stream, number in other.items():
            clock[stream] = max(clock.get(stream, -1), number)
