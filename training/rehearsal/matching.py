"""Whether all ranks of a world ask for the same collectives in the same order: where they do not, a
real run hangs.

Of a group, every rank's sequence must be the same in operation, type and size; of an all-to-all,
what one rank sends to another is what that one expects; of two ranks that send to each other, each
send meets its receive, batch by batch. And all calls must come to an end where a group does one at
a time, as NCCL's do, and each waits for its peers to begin theirs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest

from training.rehearsal.trace import Call

POINT_TO_POINT = ("send", "receive")
OTHER_SIDE = {"send": "receive", "receive": "send"}


def mismatches(calls: Mapping[int, Sequence[Call]]) -> list[str]:
    """Sentences about what does not fit between the calls of all ranks of a world, by rank; the
    first one of each group and pair."""
    sentences: list[str] = []
    for channel, members in channels(calls).items():
        sentences += _of_group(channel, members, calls)
        sentences += _of_pairs(channel, members, calls)
    return sentences or list(hangs(calls))


Event = tuple[int, int, str]
"""Rank, number of a call (of a batch, that of its first), and what happens then: the current stream
reaches it, or the call is under way."""


def hangs(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Yield a sentence about the first call of each rank that never begins, of calls that fit.

    Calls of a group come one after the other, each after what the current stream had waited for,
    and a call ends when all its peers have begun theirs.
    """
    needs: dict[Event, set[Event]] = {}
    peers: dict[Event, set[Event]] = defaultdict(set)
    meetings: dict[object, list[Event]] = defaultdict(list)
    for rank, calls_of_rank in calls.items():
        for event, before, meeting in _events(rank, calls_of_rank):
            needs.setdefault(event, before)
            if meeting is not None:
                meetings[meeting].append(event)
    for events in meetings.values():
        for event in events:
            peers[event] |= set(events)
    begun: set[Event] = set()
    done: set[Event] = set()
    waiting = dict(needs)
    while True:
        new = {event for event, before in waiting.items() if before <= done}
        begun |= new
        ended = {event for event in begun - done if peers[event] <= begun}
        done |= ended
        waiting = {event: before for event, before in waiting.items() if event not in new}
        if not new and not ended:
            break
    for rank in calls:
        stuck = min((i for r, i, what in waiting if r == rank and what == "call"), default=None)
        if stuck is not None:
            call = calls[rank][stuck]
            yield f"{call.kind} at {call.place} on rank {rank} never begins: the ranks deadlock"


def _events(rank: int, calls: Sequence[Call]) -> Iterator[tuple[Event, set[Event], object | None]]:
    """Each event of a rank with those that come before it and, of calls, what peers share of it."""
    first: dict[object, int] = {}  # call of each batch
    last: dict[str, Event] = {}  # of each group
    counts: dict[object, int] = defaultdict(int)
    events: list[Event] = []
    stream: set[Event] = set()
    for i, call in enumerate(calls):
        number = first.setdefault(call.batch or -i - 1, i)
        event, reached = (rank, number, "call"), (rank, i, "stream")
        yield reached, stream | {events[k] for k in call.after}, None
        key: object = call.channel
        if call.peer is not None:
            key = call.channel, *((rank, call.peer) if call.kind == "send" else (call.peer, rank))
        before = {last[call.channel]} if last.get(call.channel, event) != event else set()
        yield event, before | {reached}, (key, counts[key])
        counts[key] += 1
        last[call.channel] = event
        events.append(event)
        stream = {reached, event} if call.waits else {reached}


def channels(calls: Mapping[int, Sequence[Call]]) -> dict[str, tuple[int, ...]]:
    """Name and ranks of every group that any rank has used."""
    return {call.channel: call.group for of_rank in calls.values() for call in of_rank}


def _of_group(
    channel: str, members: Sequence[int], calls: Mapping[int, Sequence[Call]]
) -> Iterator[str]:
    """The first collective of a group that is not the same on all of its ranks."""
    sequences = {rank: _collectives(calls[rank], channel) for rank in members if rank in calls}
    for number, each in enumerate(zip_longest(*sequences.values())):
        signatures = {rank: _signature(call) for rank, call in zip(sequences, each, strict=True)}
        first = next(iter(signatures))
        other = next((r for r in signatures if signatures[r] != signatures[first]), None)
        if other is not None:
            yield (
                f"collective {number} of group {channel} (ranks {_shown(members)}) is "
                f"{_described(sequences[first], number)} on rank {first} and "
                f"{_described(sequences[other], number)} on rank {other}"
            )
            return
        yield from _of_all_to_all(channel, number, members, sequences)


def _of_all_to_all(
    channel: str, number: int, members: Sequence[int], sequences: Mapping[int, Sequence[Call]]
) -> Iterator[str]:
    """Rows of an all-to-all that one rank sends and another does not expect."""
    for source, sent_calls in sequences.items():
        if sent_calls[number].kind != "all_to_all":
            return
        for target, received_calls in sequences.items():
            sent = sent_calls[number].out[members.index(target)]
            expected = received_calls[number].into[members.index(source)]
            if sent != expected:
                yield (
                    f"collective {number} of group {channel}: rank {source} sends {sent} elements "
                    f"to rank {target}, which expects {expected} (at {sent_calls[number].place})"
                )
                return


def _of_pairs(
    channel: str, members: Sequence[int], calls: Mapping[int, Sequence[Call]]
) -> Iterator[str]:
    """The first send or receive of two ranks that the other side does not meet."""
    for one in members:
        for other in members:
            if one < other and one in calls and other in calls:
                yield from _of_pair(channel, one, other, calls)


def _of_pair(
    channel: str, one: int, other: int, calls: Mapping[int, Sequence[Call]]
) -> Iterator[str]:
    first = _batches(calls[one], channel, other)
    second = _batches(calls[other], channel, one)
    nothing: list[Call] = []
    for number, (a, b) in enumerate(zip_longest(first, second, fillvalue=nothing)):
        if _meeting(a) != sorted((call.kind, call.dtype, call.numel) for call in b):
            place = (a or b)[0].place
            yield (
                f"batch {number} between ranks {one} and {other} of group {channel}: "
                f"{_kinds(a)} on rank {one}, {_kinds(b)} on rank {other} (at {place})"
            )
            return


def _meeting(batch: Sequence[Call]) -> list[tuple[str, str, int]]:
    """What the other side of a batch must do."""
    return sorted((OTHER_SIDE[call.kind], call.dtype, call.numel) for call in batch)


def _batches(calls: Sequence[Call], channel: str, peer: int) -> list[list[Call]]:
    """The sends to and receives from a peer, those of one batch together."""
    numbered = [
        (i, call)
        for i, call in enumerate(calls)
        if call.kind in POINT_TO_POINT and call.channel == channel and call.peer == peer
    ]
    key = groupby(numbered, key=lambda each: (each[1].batch, None if each[1].batch else each[0]))
    return [[call for _, call in together] for _, together in key]


def _collectives(calls: Sequence[Call], channel: str) -> list[Call]:
    return [c for c in calls if c.channel == channel and c.kind not in POINT_TO_POINT]


def _signature(call: Call | None) -> tuple[str, str, int, str] | None:
    return None if call is None else (call.kind, call.dtype, call.numel, call.detail)


def _described(calls: Sequence[Call], number: int) -> str:
    if number >= len(calls):
        return "nothing"
    call = calls[number]
    return f"{call.kind} of {call.numel} {call.dtype} {call.detail} at {call.place}".replace(
        "  ", " "
    )


def _kinds(batch: Sequence[Call]) -> str:
    words = [f"{call.kind} of {call.numel} {call.dtype}" for call in batch]
    return " and ".join(words) or "nothing"


def _shown(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
